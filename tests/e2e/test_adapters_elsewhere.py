"""Requests with adapters get over ranks, with beams, with cores apart and through a proxy what they get alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import SamplingParams
from octavo.core.sampling_params import OutputKind
from tests.e2e import test_proxy as proxies
from tests.e2e.test_adapters import ASKED, NAMES, PROMPTS, alone, base, named, opened, params_of, together
from tests.e2e.test_proxy import run
from tests.fakes.whole_engines import started

__all__ = ["alone", "base", "run"]  # fixtures
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("args", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_give_what_one_rank_gives(base: Path, alone: list[Any], args: dict[str, Any]) -> None:
    with opened(base, max_loras=2, max_num_batched_tokens=64, max_num_seqs=8, **args) as llm:
        assert together(llm, base) == alone


def test_a_beam_search_with_an_adapter_finds_what_it_finds_alone(base: Path) -> None:
    params = SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [(PROMPTS[0], None), (PROMPTS[0], "a"), (PROMPTS[2], "b"), (PROMPTS[0], "c")]
    with opened(base, max_loras=3) as llm:
        lonely = [
            llm.generate([prompt], params, lora_request=named(base, name), use_tqdm=False)[0].outputs
            for prompt, name in asked
        ]
        adapters = [named(base, name) for _, name in asked]
        found = llm.generate([prompt for prompt, _ in asked], params, lora_request=adapters, use_tqdm=False)
        assert [each.outputs for each in found] == lonely
    assert lonely[0] != lonely[1] != lonely[3]


@pytest.mark.anyio
async def test_prefill_and_decode_cores_give_what_one_core_gives(base: Path, alone: list[Any]) -> None:
    args = {"block_size": 4, "num_gpu_blocks_override": 400, "threads": 1, "dtype": "float32", "swap_space": 0}
    split = {"prefill": 1, "decode": 1, "split_min_tokens": 4}

    async def read(number: int) -> Any:
        prompt, name = ASKED[number]
        params = msgspec.structs.replace(params_of(prompt), output_kind=OutputKind.FINAL_ONLY)
        async for output in llm.generate({"prompt_token_ids": PROMPTS[prompt]}, params, lora_request=named(base, name)):
            assert output.error is None, output.error
        return output.outputs

    async with started(model=str(base), enable_lora=True, max_loras=2, **args, **split) as llm:
        assert await asyncio.gather(*(read(number) for number in range(len(ASKED)))) == alone
        assert llm.stats.num_handovers > 0


def test_a_proxy_has_the_adapters_of_its_engines(base: Path, alone: list[Any], run: proxies.Run) -> None:
    sizes = ("--threads", "1", "--num-gpu-blocks-override", "400", "--swap-space", "0", "--block-size", "4")
    common = ("--enable-lora", "--max-loras", "2", "--dtype", "float32", *sizes)
    engine = run("serve", str(base), "--role", "decode", "--port", "0", *common)
    modules = [word for name in NAMES for word in ("--lora-modules", f"{name}={base / name}")]
    words = ("--decode", engine.where, "--port", "0", "--enable-lora")
    proxy = run("proxy", str(base), *words, *modules, "--served-model-name", "base")
    url = f"http://{proxy.where}"
    for name in ("base", *NAMES):
        body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0.0, "logprobs": 2}
        [choice] = proxies.answer(f"{url}/v1/completions", {**body, "ignore_eos": True})["choices"]
        number = ASKED.index((0, None if name == "base" else name))
        assert choice["logprobs"]["token_logprobs"] == proxies.logprobs_of(alone[number][0])
