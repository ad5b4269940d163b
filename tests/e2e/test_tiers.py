"""KV that is kept on disk or in shared memory: a later engine computes less, and gives the same bits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.core.outputs import RequestOutput
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALTERNATING
from tests.fakes.running_sum import make_running_sum

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little girl who had a dog and a cat. They lived near the forest. " * 8
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, logprobs=2)
SIZES: dict[str, Any] = {"num_gpu_blocks_override": 128, "threads": 1}


def generate(
    prompt: Any = PROMPT, salt: str | None = None, params: SamplingParams = PARAMS, **args: Any
) -> RequestOutput:
    """Return the output of an engine that starts and ends."""
    llm = LLM(**(SIZES | args))
    try:
        return llm.generate([prompt], params, cache_salt=salt)[0]
    finally:
        llm.close()


def most_fetched(output: RequestOutput) -> int:
    """Return the tokens of the prompt's full blocks, without its last token."""
    return min(len(output.prompt_token_ids) // 16 * 16, len(output.prompt_token_ids) - 1)


def bits(output: RequestOutput) -> tuple[Any, ...]:
    (completion,) = output.outputs
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize(
    "args",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=lambda args: "-".join(map(str, args.values())),
)
def test_a_later_engine_fetches_the_prompt_and_gives_the_same_bits(tmp_path: Path, args: dict[str, Any]) -> None:
    args = args | {"kv_disk": str(tmp_path)}
    first, second = generate(**args), generate(**args)
    assert (first.num_fetched_tokens, second.num_fetched_tokens) == (0, most_fetched(first))
    assert bits(second) == bits(first)
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(folders) == args.get("tensor_parallel_size", 1)


def test_an_engine_that_ends_at_once_has_saved_all(tmp_path: Path) -> None:
    prompt = {"prompt_token_ids": [7 * position % 101 + 300 for position in range(1000)]}
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
    first, second = (generate(prompt, params=one, kv_disk=str(tmp_path)) for _ in range(2))
    assert second.num_fetched_tokens == most_fetched(first) == 992
    assert bits(first) == bits(second)


def test_a_later_engine_with_other_numbers_fetches_nothing(tmp_path: Path) -> None:
    generate(kv_disk=str(tmp_path), dtype="float32")
    assert generate(kv_disk=str(tmp_path), dtype="bfloat16").num_fetched_tokens == 0
    assert generate(kv_disk=str(tmp_path), dtype="float32", block_size=32).num_fetched_tokens == 0
    assert generate(kv_disk=str(tmp_path), dtype="float32", salt="s").num_fetched_tokens == 0
    assert generate(kv_disk=str(tmp_path), dtype="float32").num_fetched_tokens > 0


def test_layers_with_a_window_are_kept_too(tmp_path: Path) -> None:
    """The first blocks of those layers are not needed, and not written."""
    path = make_checkpoint("qwen3", tmp_path / "model", vocab_size=260, eos_token_id=257, **ALTERNATING)
    args: dict[str, Any] = {"model": str(write_byte_tokenizer(path)), "num_gpu_blocks_override": 64}
    prompt = {"prompt_token_ids": [7 * position % 101 + 3 for position in range(90)]}
    plain = generate(prompt, **args)
    first, second = (generate(prompt, kv_disk=str(tmp_path / "kv"), **args) for _ in range(2))
    assert second.num_fetched_tokens == 80
    assert bits(second) == bits(first) == bits(plain)


@pytest.mark.parametrize("place", [0, 5])
def test_a_damaged_file_is_computed_again(tmp_path: Path, place: int) -> None:
    first = generate(kv_disk=str(tmp_path))
    files = sorted(tmp_path.glob("*/*.0"), key=lambda path: path.stat().st_mtime_ns)
    damaged = bytearray(files[place].read_bytes())
    damaged[-1] ^= 1
    files[place].write_bytes(damaged)
    second, third = (generate(kv_disk=str(tmp_path)) for _ in range(2))
    assert (second.num_fetched_tokens, third.num_fetched_tokens) == (0, most_fetched(first))
    assert bits(second) == bits(third) == bits(first)


def test_two_engines_use_a_folder_at_once(tmp_path: Path) -> None:
    """It is too small for all of their blocks, so that each removes what the other may be about to fetch."""
    prompts = [f"{number} {PROMPT}" for number in range(4)]
    llm = LLM(**SIZES)
    expected = [bits(output) for output in llm.generate(prompts, PARAMS)]
    llm.close()
    found: list[list[Any]] = []

    def run() -> None:
        llm = LLM(**(SIZES | {"num_gpu_blocks_override": 24, "kv_disk": str(tmp_path), "kv_disk_size": 1 << 19}))
        for _ in range(3):
            found.append([bits(llm.generate([prompt], PARAMS)[0]) for prompt in prompts])
        llm.close()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.0")) <= 1 << 19


@pytest.mark.anyio
async def test_replicas_share_the_host_tier_and_leave_nothing() -> None:
    args: dict[str, Any] = SIZES | {"data_parallel_size": 2, "router": "round-robin", "kv_host_size": 64 << 20}
    llm = await AsyncLLM.start(EngineArgs(**args))
    try:
        folder = Path(llm.config.transfer.host_folder)
        outputs = []
        for _ in range(2):
            outputs += [output async for output in llm.generate(PROMPT, PARAMS) if output.finished]
            # blocks are saved beside later steps; the second request is not to arrive before they are there
            async with asyncio.timeout(200):
                while len(list(folder.glob("*/*.0"))) < most_fetched(outputs[0]) // 16:
                    await asyncio.sleep(0.01)
        assert [output.num_fetched_tokens > 0 for output in outputs] == [False, True]
        assert bits(outputs[0]) == bits(outputs[1])
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        await llm.shutdown()
    assert not folder.exists()


def test_a_later_engine_goes_on_behind_a_state_that_it_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_byte_tokenizer(make_running_sum(tmp_path / "model", monkeypatch, vocab_size=300))
    args = {"model": str(model), "kv_disk": str(tmp_path / "disk"), "max_model_len": 128}
    prompt = {"prompt_token_ids": [7 * place % 101 + 3 for place in range(70)]}
    first, second = generate(prompt, **args), generate(prompt, **args)
    assert (first.num_fetched_tokens, second.num_fetched_tokens) == (0, 64)
    assert bits(second) == bits(first)
