"""Whole engines of a process or of several: started for a block of a test, looked into, and run to the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.core.outputs import CompletionOutput
from octavo.engine.engine_core import EngineCore
from tests.fakes.accounting import check_scheduler


def core_of(llm: LLM) -> EngineCore:
    core = llm.engine.core
    assert isinstance(core, EngineCore)
    return core


@asynccontextmanager
async def started(**args: Any) -> AsyncIterator[AsyncLLM]:
    """An engine whose cores are processes, until the block ends."""
    llm = await AsyncLLM.start(EngineArgs(**args))
    try:
        yield llm
    finally:
        await llm.shutdown()


def run_together(llm: LLM, requests: Iterable[tuple[Any, SamplingParams]]) -> list[list[CompletionOutput]]:
    """Run all requests in one batch, which they enter one after the other."""
    found: dict[int, list[CompletionOutput]] = {}
    for number, (prompt, params) in enumerate(requests):
        llm.engine.add_request(str(number), prompt, params)
        found.update({int(each.request_id): each.outputs for each in llm.engine.step()})
    while llm.engine.has_unfinished_requests():
        found.update({int(each.request_id): each.outputs for each in llm.engine.step()})
        check_scheduler(core_of(llm).scheduler)
    return [found[number] for number in sorted(found)]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(200):
        while not condition():
            await asyncio.sleep(0.001)


async def all_streams(
    read: Callable[[AsyncLLM, int, list[int]], Coroutine[Any, Any, Any]], llm: AsyncLLM, count: int, disturb: Any = None
) -> list[Any]:
    """Read streams, which enter into a list how many tokens they have; `disturb` is called when half have some."""
    progress = [0] * count
    reading = [asyncio.create_task(read(llm, number, progress)) for number in range(count)]
    if disturb is not None:
        await eventually(lambda: sum(each >= 4 for each in progress) >= count // 2)
        disturb()
    return list(await asyncio.gather(*reading))
