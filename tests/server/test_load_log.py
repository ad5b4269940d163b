"""A log line under load, none at rest."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.messages import SchedulerStats
from octavo.server.load_log import describe_load, log_load
from octavo.server.sending import OpenRequests
from tests.server.fake_llm import FakeAsyncLLM


def test_line_tells_queues_cache_and_rates() -> None:
    before = SchedulerStats(num_prompt_tokens=100, num_generated_tokens=10, num_cached_tokens=8, num_queried_tokens=20)
    after = SchedulerStats(
        num_running=3,
        num_waiting=2,
        num_swapped=1,
        num_blocks=200,
        num_used_blocks=50,
        num_prompt_tokens=5100,
        num_generated_tokens=60,
        num_cached_tokens=32,
        num_queried_tokens=120,
    )
    assert describe_load(before, after, 5.0) == (
        "3 running, 2 waiting, 1 swapped; KV 25.0%; 1,000.0 prompt and 10.0 generated tokens/s, 24% prefix hits"
    )
    assert "prefix" not in describe_load(after, after, 5.0)
    after.num_fetched_tokens = 50
    assert describe_load(before, after, 5.0).endswith("24% prefix hits, 50% fetched")


@pytest.mark.anyio
async def test_lines_come_while_a_request_is_open_and_stop_with_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.server.load_log")
    requests, done = OpenRequests(), asyncio.Event()

    async def receive() -> dict[str, str]:
        await done.wait()
        return {"type": "http.disconnect"}

    logger = asyncio.create_task(log_load(cast(AsyncLLM, FakeAsyncLLM()), requests, interval_s=0.01))
    await asyncio.sleep(0.05)
    assert caplog.records == []
    async with requests.track(receive):
        await asyncio.sleep(0.05)
    assert len(caplog.records) >= 2
    await asyncio.sleep(0.05)
    at_rest = len(caplog.records)
    await asyncio.sleep(0.05)
    assert len(caplog.records) == at_rest
    logger.cancel()
    await asyncio.gather(logger, return_exceptions=True)
