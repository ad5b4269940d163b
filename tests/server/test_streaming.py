"""Streams over real sockets: a client that goes away ends its request, a slow one holds it back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import openai
import pytest

from octavo.core.outputs import RequestOutput
from octavo.server.streaming import merge
from tests.server.conftest import Served
from tests.server.raw import connect, eventually

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_away_ends_its_request(server: Served, path: str, stream: bool) -> None:
    server.llm.endless, server.llm.token_interval_s = True, 0.001
    body = {**(CHAT if "chat" in path else {"prompt": ["a", "b"]}), "stream": stream}
    with connect(server.url) as connection:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        eventually(lambda: len(server.llm.requests) == (1 if "chat" in path else 2))
        assert server.llm.aborted == []
    eventually(lambda: len(server.llm.aborted) == len(server.llm.requests))


def test_client_that_goes_away_before_the_first_token_ends_its_request(server: Served) -> None:
    server.llm.hold_after = 0
    with connect(server.url) as connection:
        connection.request("POST", "/v1/completions", '{"prompt": "a"}', {"Content-Type": "application/json"})
        eventually(lambda: server.llm.requests)
    eventually(lambda: server.llm.aborted)


def test_client_that_closes_its_stream_ends_its_request(client: openai.OpenAI, server: Served) -> None:
    server.llm.endless, server.llm.token_interval_s = True, 0.001
    with client.completions.create(model="letters", prompt="a", stream=True) as stream:
        next(iter(stream))
    eventually(lambda: server.llm.aborted)


def test_reader_that_stops_holds_the_stream_back(server: Served) -> None:
    server.llm.endless = True
    with connect(server.url) as connection:
        body = {"prompt": "a", "stream": True, "cache_salt": "s"}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

        def stands_still() -> bool:
            before = server.llm.num_outputs
            time.sleep(0.2)
            return before == server.llm.num_outputs > 0

        eventually(stands_still, timeout_s=20)
        held_at = server.llm.num_outputs
        response = connection.getresponse()
        # what lay in the sockets is read, and the stream goes on
        eventually(lambda: response.read(100_000) and server.llm.num_outputs > held_at)


def test_other_requests_are_answered_while_one_streams(client: openai.OpenAI, server: Served) -> None:
    server.llm.hold_after = 20
    with client.completions.create(model="letters", prompt="a", max_tokens=30, stream=True) as stream:
        next(iter(stream))
        assert client.completions.create(model="letters", prompt="b", max_tokens=5).choices[0].text == "Block"


def _output(name: str, finished: bool = False) -> RequestOutput:
    return RequestOutput(request_id=name, prompt=None, prompt_token_ids=[], outputs=[], finished=finished)


class Source:
    """A stream of `length` outputs that notes how far it was read, and that it was closed."""

    def __init__(self, name: str, length: int, error: Exception | None = None) -> None:
        self.name, self.length, self.error = name, length, error
        self.num_made, self.closed = 0, False

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for _ in range(self.length):
                self.num_made += 1
                await asyncio.sleep(0)
                yield _output(self.name)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.anyio
@pytest.mark.parametrize("lengths", [[3], [3, 0, 5]])
async def test_merge_gives_every_output_with_its_index(lengths: list[int]) -> None:
    sources = [Source(str(index), length) for index, length in enumerate(lengths)]
    seen = [(index, output.request_id) async for index, output in merge([source.outputs() for source in sources])]
    assert sorted(seen) == [(index, str(index)) for index, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.anyio
async def test_merge_ends_all_streams_with_the_first_error() -> None:
    sources = [Source("a", 10**6), Source("b", 2, ValueError("b failed"))]
    with pytest.raises(ValueError, match="b failed"):
        async for _ in merge([source.outputs() for source in sources]):
            pass
    assert [source.closed for source in sources] == [True, True]
    assert sources[0].num_made <= 4, "streams are not served in turn"


@pytest.mark.anyio
async def test_merge_that_is_closed_closes_its_streams_and_reads_not_far_ahead() -> None:
    sources = [Source(str(index), 10**6) for index in range(5)]
    async with aclosing(merge([source.outputs() for source in sources])) as merged:
        await anext(merged)
        for _ in range(100):
            await asyncio.sleep(0)
    assert all(source.closed for source in sources)
    assert max(source.num_made for source in sources) <= 3
