"""Readers of outputs: what is taken where it is made, and what waits for the task."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.engine.output.open_request import OpenRequest
from octavo.engine.output.readers import Reader

pytestmark = pytest.mark.anyio


class Request:
    """A request that changes when it is told to: `add` a text, `end` it, or `fail`, after which nothing is new."""

    def __init__(self) -> None:
        self.finished = False
        self.on_change: Any = None
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text
        self.on_change()

    def end(self) -> None:
        self.finished = True
        self.on_change()

    def output(self) -> RequestOutput | None:
        text, self._text = self._text, ""
        if not text and not self.finished:
            return None
        completion = CompletionOutput(index=0, text=text, token_ids=[], cumulative_logprob=None)
        return RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=[1], outputs=[completion], finished=self.finished
        )


class Direct:
    def __init__(self) -> None:
        self.taken: list[tuple[int, str]] = []
        self.is_open = True
        self.error: Exception | None = None

    def can_take(self) -> bool:
        return self.is_open

    def take(self, index: int, output: RequestOutput) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append((index, output.outputs[0].text))


def reading(direct: Direct | None, count: int = 1) -> tuple[Reader, list[Request]]:
    reader, requests = Reader(direct), [Request() for _ in range(count)]
    reader.watch(cast(list[OpenRequest], requests))
    return reader, requests


def texts(reader: Reader) -> list[tuple[int, str]]:
    return [(index, output.outputs[0].text) for index, output in reader.changed() if output is not None]


async def waiting(reader: Reader) -> asyncio.Task[None]:
    task = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    return task


async def test_outputs_are_taken_where_they_are_made_but_the_last() -> None:
    direct = Direct()
    reader, [first, second] = reading(direct, 2)
    task = await waiting(reader)
    first.add("a")
    second.add("b")
    first.add("c")
    assert direct.taken == [(0, "a"), (1, "b"), (0, "c")]
    assert not task.done()
    first.add("d")
    first.end()
    await task
    assert direct.taken[3:] == [(0, "d")]
    assert texts(reader) == [(0, "")]
    assert list(reader.open) == [1]


async def test_what_was_not_taken_goes_first() -> None:
    """Neither what comes before the task waits, nor what comes until it has read, is overtaken."""
    direct = Direct()
    reader, [request] = reading(direct)
    request.add("a")
    task = await waiting(reader)
    request.add("b")
    await task
    request.add("c")
    assert texts(reader) == [(0, "abc")]
    assert direct.taken == []
    direct.is_open = False
    task = await waiting(reader)
    request.add("d")
    direct.is_open = True
    request.add("e")
    await task
    assert texts(reader) == [(0, "de")]
    task = await waiting(reader)
    request.add("f")
    assert direct.taken == [(0, "f")]
    task.cancel()


async def test_error_of_the_direct_reader_is_raised_in_the_task() -> None:
    direct = Direct()
    reader, [request] = reading(direct)
    task = await waiting(reader)
    direct.error = ValueError("no event")
    request.add("a")
    with pytest.raises(ValueError, match="no event"):
        await task


async def test_death_wakes_the_task() -> None:
    """An engine that dies changes no request, but every reader is to look."""
    reader, [request] = reading(Direct())
    task = await waiting(reader)
    request.on_change()
    await asyncio.wait_for(task, 100)
    assert list(reader.changed()) == [(0, None)]


async def test_reader_that_was_cancelled_takes_nothing() -> None:
    direct = Direct()
    reader, [request] = reading(direct)
    task = await waiting(reader)
    task.cancel()
    await asyncio.wait([task])
    request.add("a")
    assert direct.taken == []
