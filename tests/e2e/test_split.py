"""Real prefill and decode cores of octavo-tiny: whatever is generated, and whoever leaves, is as with one engine."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM
from octavo.async_llm import AsyncLLM
from octavo.core.sampling_params import OutputKind, SamplingParams
from tests.e2e.test_dying_cores import processes
from tests.fakes import whole_engines

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STORY = "Once upon a time there was a little girl who had a dog and a cat. They lived in a house near the forest. "
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    "log-probabilities": {"temperature": 0.8, "seed": 4, "logprobs": 3},
    "several": {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 1},
    "best of": {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 6},
    "beams": {"use_beam_search": True, "n": 3, "temperature": 0.0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "seed": 7},
    "stop strings": {"stop": [" ", "e"], "n": 4, "seed": 8, "temperature": 1.2},
    "one token": {"max_tokens": 1, "logprobs": 2, "n": 2, "seed": 9},
    "least tokens": {"min_tokens": 9, "seed": 10},
    "form": {"structured_outputs": {"regex": "(yes|no)[0-9]{4}"}, "seed": 12, "n": 2},
    "named tokens": {
        "logprob_token_ids": (5, 9),
        "allowed_token_ids": (5, 6),
        "n": 2,
        "seed": 13,
        "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
    },
    "of the prompt": {"prompt_logprobs": 1, "seed": 11},
}


def started(**args: Any) -> AbstractAsyncContextManager[AsyncLLM]:
    return whole_engines.started(num_gpu_blocks_override=512, threads=1, **args)


def prompt_of(number: int) -> str:
    """Long ones whose lengths end anywhere in a block, with and without a common beginning."""
    return f"{number % 3} " + STORY * (1 + number % 3) + "And then" * (number % 5) + f" {number}"


async def read(llm: AsyncLLM, number: int, kind: str, salt: str | None) -> Any:
    streams = number % 2 == 0
    params = SamplingParams(
        **{"max_tokens": 12, "output_kind": OutputKind.DELTA if streams else OutputKind.FINAL_ONLY} | KINDS[kind]
    )
    pieces: dict[int, Any] = {}
    async for output in llm.generate(prompt_of(number), params, cache_salt=salt):
        assert output.error is None, output.error
        for each in output.outputs:
            old = pieces.get(each.index)
            if old is not None:
                lists = {
                    name: getattr(old, name) + getattr(each, name)
                    for name in ("text", "token_ids", "logprobs", "text_offsets")
                    if getattr(each, name) is not None
                }
                each = msgspec.structs.replace(each, **lists)
            pieces[each.index] = each
    assert output.num_cached_tokens + output.num_fetched_tokens < len(output.prompt_token_ids)
    return pieces, output.num_generated_tokens, output.prompt_logprobs if not streams else None


ASKED = [
    (number, kind, salt) for number, kind in enumerate([*KINDS, *KINDS]) for salt in (None, "salted")[: 1 + number % 2]
]


async def read_all(llm: AsyncLLM) -> list[Any]:
    return list(await asyncio.gather(*(read(llm, *each) for each in ASKED)))


def of_one_engine() -> tuple[list[Any], int]:
    """What the same requests give in one engine of this process, and how many tokens their prompts have."""
    params = [SamplingParams(**{"max_tokens": 12} | KINDS[kind]) for _, kind, _ in ASKED]
    prompts, salts = [prompt_of(number) for number, *_ in ASKED], [salt for *_, salt in ASKED]
    with LLM(num_gpu_blocks_override=512, threads=1) as llm:
        outputs = llm.generate(prompts, params, cache_salt=salts, use_tqdm=False)
        found = [
            (
                {each.index: each for each in output.outputs},
                output.num_generated_tokens,
                output.prompt_logprobs if number % 2 else None,
            )
            for (number, *_), output in zip(ASKED, outputs, strict=True)
        ]
        return found, llm.engine.stats.num_prompt_tokens


async def leave(llm: AsyncLLM, count: int) -> None:
    """Begin requests and leave them behind so many outputs, or before the first."""
    outputs = llm.generate(prompt_of(20 + count), SamplingParams(max_tokens=100, ignore_eos=True, n=2))
    if not count:
        reading = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0.002)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    for _ in range(count):
        await anext(outputs)
    await outputs.aclose()


async def restarted(llm: AsyncLLM, count: int) -> None:
    async with asyncio.timeout(200):
        while (llm.stats.num_restarts, llm.stats.num_ready) != (count, 2):
            await asyncio.sleep(0.01)


@pytest.fixture
def meeting_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the folders in which cores meet, with that of a server that was killed."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        Path(directory, "octavo-split-killed").mkdir(mode=0o700)
        yield Path(directory)


async def test_split_engines_give_what_one_gives(caplog: pytest.LogCaptureFixture, meeting_places: Path) -> None:
    expected, num_prompt_tokens = of_one_engine()
    with caplog.at_level(logging.INFO, "octavo"):
        async with started(prefill=1, decode=1, split_min_tokens=8) as llm:
            (place,) = meeting_places.glob("octavo-split-*")
            assert place.name != "octavo-split-killed"
            assert await read_all(llm) == expected
            assert llm.stats.num_handovers > 10
            assert llm.stats.num_prompt_tokens <= num_prompt_tokens  # none counts twice
            assert llm.stats.num_fetched_tokens > 200  # what prompts have in common is fetched once
            others = asyncio.gather(*(leave(llm, count) for count in (0, 0, 1, 2, 5)))
            assert await read_all(llm) == expected
            await others
            reading = asyncio.ensure_future(read_all(llm))
            processes(llm)[0].kill()
            assert await reading == expected
            await restarted(llm, 1)
            assert await llm.reset_prefix_cache() in (True, False)
            reading = asyncio.ensure_future(read_all(llm))
            await asyncio.sleep(0.05)
            processes(llm)[1].send_signal(signal.SIGKILL)
            assert await reading == expected
            await restarted(llm, 2)
            assert llm.stats.num_handover_mismatches == 0
            metrics = llm.metrics.render().decode()
            assert 'octavo:handovers_total{engine="0",model_name="octavo-tiny",role="prefill"}' in metrics
    assert not place.exists()
    places = [record.getMessage() for record in caplog.records if "processors" in record.getMessage()]
    assert [each.split(":")[0] for each in places] == ["prefill 0", "decode 1"]
