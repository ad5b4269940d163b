"""Every kind of cache moves, `==`: over a disk to a later engine, from prefill to decode cores, and behind a core that
is killed in mid-stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.core.sampling_params import OutputKind
from tests.e2e.test_dying_cores import processes
from tests.e2e.test_families import VOCABULARY, make
from tests.fakes.whole_engines import started

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FAMILIES = {
    "qwen3_5": "states",
    "qwen4_exp": "states beside chosen keys",
    "youtu": "latents",
    "deepseek_v3": "latents",
    "falcon_h1": "a state and keys in each layer",
    "gemma3": "windows",
    "gpt_oss": "windows and sinks",
    "granitemoehybrid": "states",
    "lfm2": "convolutions",
    "nemotron_h": "states, and layers that keep nothing",
    "qwen3_next": "states",
}
"""What families keep; the first one is run each time."""
SHARED = [7 * i % VOCABULARY for i in range(70)]
SIZES: dict[str, Any] = {"max_model_len": 208, "num_gpu_blocks_override": 160, "threads": 1, "dtype": "bfloat16"}
families = pytest.mark.parametrize(
    "family", [each if each == "qwen3_5" else pytest.param(each, marks=pytest.mark.long) for each in FAMILIES]
)


def requests(max_tokens: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with and without a common beginning, whose lengths end anywhere in a block."""
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1, "n": 2}, {"seed": 2, "top_p": 0.9, "logprobs": 2}]
    return [
        (
            SHARED[: 35 * (number % 3)] + [(number + 11 * i) % VOCABULARY for i in range(20 + 9 * number)],
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY, **way),
        )
        for number, way in enumerate([*ways, *ways])
    ]


async def read(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> Any:
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        assert output.error is None, output.error
    return output.outputs


async def read_all(llm: AsyncLLM, max_tokens: int = 12) -> list[Any]:
    return list(await asyncio.gather(*(read(llm, *each) for each in requests(max_tokens))))


def alone(path: Path, max_tokens: int) -> list[Any]:
    with LLM(str(path), enable_prefix_caching=False, **SIZES) as llm:
        return [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt, params in requests(max_tokens)]


@families
def test_a_later_engine_fetches_what_was_kept(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(family, tmp_path / "model", monkeypatch)
    expected = alone(path, 12)
    num_fetched = []
    for _ in range(2):
        with LLM(str(path), kv_disk=str(tmp_path / "disk"), **SIZES) as llm:
            found = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in requests(12)]
        assert [each.outputs for each in found] == expected
        num_fetched.append(sum(each.num_fetched_tokens for each in found))
    assert num_fetched[1] > num_fetched[0] == 0


@families
async def test_prefill_cores_hand_it_over(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(family, tmp_path / "model", monkeypatch)
    expected = alone(path, 12)
    async with started(model=str(path), **SIZES, prefill=1, decode=1, split_min_tokens=8) as llm:
        assert await read_all(llm) == expected
        assert llm.stats.num_handovers == len(expected)
        assert llm.stats.num_fetched_tokens > 100


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_killed_core_changes_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(family, tmp_path / "model", monkeypatch)
    expected = alone(path, 60)
    sizes = SIZES | {"preemption_mode": "swap", "swap_space": 0.01, "num_gpu_blocks_override": 30}
    async with started(model=str(path), **sizes) as llm:
        reading = asyncio.ensure_future(read_all(llm, 60))
        while llm.stats.num_generated_tokens < 60:
            await asyncio.sleep(0.002)
        assert not reading.done()
        processes(llm)[0].kill()
        assert await reading == expected
        assert llm.stats.num_restarts == 1
