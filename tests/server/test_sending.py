"""Streams over real sockets: a client that goes away ends its request, a slow one holds it back."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import pytest

from octavo.server.sending import EventStream, OpenRequests
from tests.server.conftest import Served
from tests.server.fake_llm import SENTENCE
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


def test_reader_that_stops_holds_the_stream_back(start_server: Callable[[], Served]) -> None:
    server = start_server()
    # its connections have that, too: or megabytes of events lie in the sockets before the stream stands still
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
    server.llm.endless = True
    with connect(server.url) as connection:
        body = {"prompt": "a", "stream": True, "cache_salt": "s"}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

        def stands_still() -> bool:
            before = server.llm.num_outputs
            time.sleep(0.2)
            return before == server.llm.num_outputs > 0

        eventually(stands_still)
        held_at = server.llm.num_outputs
        response = connection.getresponse()
        # what lay in the sockets is read, and the stream goes on
        read = b""
        while server.llm.num_outputs <= held_at:
            read += response.read(100_000)
        for _ in range(2 * held_at):  # an event and an empty line
            read += response.readline()
    events = [json.loads(line[6:]) for line in read.split(b"\n")[:-1] if line]
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert len(events) > held_at
    assert text == (SENTENCE * (len(text) // len(SENTENCE) + 1))[: len(text)]


def test_other_requests_are_answered_while_one_streams(client: openai.OpenAI, server: Served) -> None:
    server.llm.hold_after = 20
    with client.completions.create(model="letters", prompt="a", max_tokens=30, stream=True) as stream:
        next(iter(stream))
        assert client.completions.create(model="letters", prompt="b", max_tokens=5).choices[0].text == "Block"


def test_events_that_are_all_ready_leave_turns_of_the_loop_to_others() -> None:
    """One step of a request with n=256 makes hundreds of events, which took 400 ms in one turn."""
    num_turns = num_sent = 0

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(800):
            yield b"data: {}\n\n"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += 1

    async def tick() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        scope = {"type": "http", "method": "POST", "state": {"request_id": "a"}}
        await EventStream(events(), OpenRequests())(scope, receive, send)
        ticking.cancel()

    asyncio.run(run())
    assert num_sent == 802
    assert num_turns >= 40
