"""Images beside guesses, over replicas, split over cores, and with cores that are killed: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.cores import replica as replica_module
from tests.e2e.test_dying_cores import processes
from tests.fakes import whole_engines
from tests.fakes.vision import image, make_vision_checkpoint

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

COUNT = 12
WORDS = " ".join(f"w{number}" for number in range(20))


@pytest.fixture(scope="module", params=["gemma3", "qwen3_vl"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def started(path: Path, **args: Any) -> AbstractAsyncContextManager[AsyncLLM]:
    return whole_engines.started(model=str(path), dtype="float32", num_gpu_blocks_override=96, threads=1, **args)


async def read(llm: AsyncLLM, number: int, progress: list[int]) -> Any:
    params = SamplingParams(seed=number, n=2, max_tokens=60, logprobs=2, output_kind=OutputKind.DELTA, ignore_eos=True)
    images = [image(number % 5), image(7, 70, 90)][: 1 + number % 2]
    prompt = {"prompt": f"w{number} {WORDS} {'<image> ' * len(images)}w3", "multi_modal_data": {"image": images}}
    token_ids: list[list[int]] = [[], []]
    logprobs: list[list[Any]] = [[], []]
    async for output in llm.generate(prompt, params):
        assert output.error is None, output.error
        for each in output.outputs:
            token_ids[each.index] += each.token_ids
            logprobs[each.index] += each.logprobs or []
        progress[number] = output.num_generated_tokens
    return token_ids, logprobs


async def read_all(llm: AsyncLLM, disturb: Callable[[], Any] | None = None) -> list[Any]:
    return await whole_engines.all_streams(read, llm, COUNT, disturb)


@pytest.mark.long
async def test_streams_of_images_are_the_same_elsewhere(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "WATCH_S", 0.2)
    async with started(checkpoint) as llm:
        expected = await read_all(llm)
        assert await read_all(llm, processes(llm)[0].kill) == expected
        assert llm.stats.num_resumed > 0
    async with started(checkpoint, data_parallel_size=2) as llm:
        assert await read_all(llm) == expected
    async with started(checkpoint, prefill=1, decode=1, split_min_tokens=8) as llm:
        assert await read_all(llm) == expected
        assert llm.stats.num_handovers > 0
        assert await read_all(llm, processes(llm)[1].kill) == expected
