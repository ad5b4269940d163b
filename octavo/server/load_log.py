"""A log line every few seconds while there are requests."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from octavo.core.messages import SchedulerStats
from octavo.server.sending import OpenRequests

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0


async def log_load(llm: AsyncLLM, open_requests: OpenRequests, interval_s: float = INTERVAL_S) -> None:
    """Log until cancelled. Waits, without a timer, while no request is open."""
    while True:
        await open_requests.started.wait()
        before, measured_at = llm.stats, time.monotonic()
        while open_requests:
            await asyncio.sleep(interval_s)
            after, now = llm.stats, time.monotonic()
            if after.num_steps != before.num_steps or open_requests:
                logger.info("%s", describe_load(before, after, now - measured_at))
            before, measured_at = after, now


def describe_load(before: SchedulerStats, after: SchedulerStats, seconds: float) -> str:
    prompt_rate = (after.num_prompt_tokens - before.num_prompt_tokens) / seconds
    generated_rate = (after.num_generated_tokens - before.num_generated_tokens) / seconds
    queried = after.num_queried_tokens - before.num_queried_tokens
    fetched = after.num_fetched_tokens - before.num_fetched_tokens
    hits = f", {(after.num_cached_tokens - before.num_cached_tokens) / queried:.0%} prefix hits" if queried else ""
    hits += f", {fetched / queried:.0%} fetched" if queried and fetched else ""
    return (
        f"{after.num_running} running, {after.num_waiting} waiting, {after.num_swapped} swapped; "
        f"KV {after.kv_cache_usage:.1%}; {prompt_rate:,.1f} prompt and {generated_rate:,.1f} generated tokens/s{hits}"
    )
