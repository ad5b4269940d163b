"""How responses are sent: streams over real sockets, requests that end early, and large responses in slices."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.core.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.server.errors import ApiError, ClientDisconnectedError, shutting_down
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.routes.completions import CompletionChoice, CompletionResponse
from octavo.server.sending import (
    SLICE,
    EventStream,
    LargeResponses,
    OpenRequests,
    encode,
    free,
    is_large,
    packing,
    without_chunks,
)
from octavo.server.usage import PromptTokensDetails, Usage
from tests.server.conftest import Served
from tests.server.fake_llm import SENTENCE
from tests.server.raw import connect, eventually

pytestmark = pytest.mark.anyio
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


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_stream_that_waits_sends_comments(start_server: Callable[..., Served], num_tokens: int) -> None:
    server = start_server(sse_keep_alive_interval=0.02)
    server.llm.hold_after = num_tokens
    with connect(server.url) as connection:
        body = {"prompt": "a", "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        found: list[bytes] = []
        # on a busy machine comments come between tokens, too
        while found.count(b"data: ") < num_tokens or found[-2:] != [b": keep"] * 2:
            found.append(response.readline()[:6])
            assert found[-1] in (b"data: ", b": keep")
            assert response.readline() == b"\n"
    assert found.count(b"data: ") == num_tokens
    eventually(lambda: server.llm.aborted)


@pytest.mark.parametrize("interval_s", [0.0, 0.001])
async def test_error_after_a_comment_is_an_event(interval_s: float) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.1)
        raise ApiError(503, "the engine has stopped", code="engine_dead")
        yield b""

    async def receive() -> Any:
        await asyncio.Event().wait()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    respond = EventStream(events(), OpenRequests(interval_s))
    scope = {"type": "http", "method": "POST", "state": {"request_id": "a"}}
    if not interval_s:
        with pytest.raises(ApiError):
            await respond(scope, receive, send)
        assert sent == []
        return
    await respond(scope, receive, send)
    start, *comments, error, end = sent
    assert start["status"] == 200
    assert {each["body"] for each in comments} == {b": keep-alive\n\n"}
    assert b"engine_dead" in error["body"]
    assert not end["more_body"]
    await asyncio.sleep(0.02)
    assert sent[-1] is end


async def test_comments_and_events_that_wait_for_an_old_client_are_sent_whole() -> None:
    written: list[bytes] = []
    transport: Any = SimpleNamespace(write=written.append, close=lambda: None, is_closing=lambda: False)
    flow = FlowControl(transport)

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(3):
            flow.pause_writing()
            asyncio.get_running_loop().call_later(0.02, flow.resume_writing)
            yield b"data: %d, which is longer than a comment\n\n" % number

    scope: Any = {"type": "http", "method": "POST", "state": {"request_id": "a"}}
    log = logging.getLogger("test")
    cycle = RequestResponseCycle(
        scope, transport, flow, log, log, False, [], asyncio.Event(), False, False, lambda: None
    )
    old = without_chunks(cycle, EventStream(events(), OpenRequests(0.001)))
    await old(scope, Client().receive, cycle.send)  # type: ignore[arg-type]
    _, *bodies = written
    expected = [b"data: %d, which is longer than a comment\n\n" % number for number in range(3)]
    assert [each for each in bodies if each.startswith(b"data")] == expected
    assert b": keep-alive\n\n" in bodies


async def test_stream_that_is_ended_before_its_headers_are_sent_raises_the_reason() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: a\n\n"

    sent: list[Any] = []
    writable = asyncio.Event()

    async def send(message: Any) -> None:
        await writable.wait()  # an earlier response of the connection waits for its client
        sent.append(message)

    open_requests = OpenRequests()
    scope = {"type": "http", "method": "POST", "state": {"request_id": "a"}}
    task = asyncio.create_task(EventStream(events(), open_requests)(scope, Client().receive, send))
    await asyncio.sleep(0.02)
    open_requests.end_all(shutting_down())
    await asyncio.sleep(0.02)
    writable.set()
    with pytest.raises(ApiError, match="shut"):
        await task
    assert sent == []


class Client:
    """A connection that can go away."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def generate(requests: OpenRequests, client: Client, seconds: float = 10.0) -> str:
    async with requests.track(client.receive):
        await asyncio.sleep(seconds)
    return "answered"


async def test_client_that_goes_away_ends_its_own_request() -> None:
    requests, gone, stays = OpenRequests(), Client(), Client()
    tasks = [asyncio.create_task(generate(requests, client, 0.1)) for client in (gone, stays)]
    await asyncio.sleep(0)
    assert len(requests) == 2
    assert requests.started.is_set()
    gone.gone.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], ClientDisconnectedError)
    assert results[1] == "answered"
    assert len(requests) == 0
    assert not requests.started.is_set()


async def test_requests_whose_clients_go_away_together_end_few_in_a_turn_of_the_event_loop() -> None:
    requests, gone = OpenRequests(), [Client() for _ in range(100)]
    tasks = [asyncio.create_task(generate(requests, client)) for client in gone]
    await asyncio.sleep(0)
    for client in gone:
        client.gone.set()
    num_ended = [0]
    while num_ended[-1] < 100:
        await asyncio.sleep(0)
        num_ended.append(sum(task.done() for task in tasks))
    assert max(after - before for before, after in pairwise(num_ended)) == 16
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, ClientDisconnectedError) for each in results)


async def test_all_requests_end_with_the_reason_given() -> None:
    requests = OpenRequests()
    tasks = [asyncio.create_task(generate(requests, Client())) for _ in range(3)]
    await asyncio.sleep(0)
    requests.end_all(reason := shutting_down())
    assert await asyncio.gather(*tasks, return_exceptions=True) == [reason] * 3
    later = asyncio.create_task(generate(requests, Client(), 0.0))  # it waited for its turn, or between two parts
    assert await asyncio.gather(later, return_exceptions=True) == [reason]
    assert not requests.started.is_set()


async def test_a_body_that_nobody_reads_and_that_is_too_large_ends_its_request() -> None:
    """Otherwise nothing would notice that its client goes away, and a stream without an end would go on for ever."""

    async def receive() -> dict[str, str]:
        raise ApiError(413, "the body has more than 5 bytes")

    with pytest.raises(ApiError, match="more than 5 bytes"):
        async with OpenRequests().track(receive):
            await asyncio.sleep(10)


async def test_task_goes_on_after_its_request_has_ended() -> None:
    requests, client = OpenRequests(), Client()
    client.gone.set()
    with pytest.raises(ClientDisconnectedError):
        await generate(requests, client)
    await asyncio.sleep(0)


async def test_cancellation_from_elsewhere_stays_one() -> None:
    requests = OpenRequests()
    task = asyncio.create_task(generate(requests, Client()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(requests) == 0


def answer(num_choices: int, num_tokens: int) -> CompletionResponse:
    logprobs = CompletionLogprobs(
        tokens=["ä"] * num_tokens,
        token_logprobs=[None, *[-0.5] * num_tokens][:num_tokens],
        top_logprobs=[{"a": -0.5, "b": -1.5}] * num_tokens,
        text_offset=list(range(num_tokens)),
    )
    positions = [None, *({3: Logprob(-0.5, 1, "a")} for _ in range(num_tokens))]
    choices = [
        CompletionChoice(index=index, text="x", logprobs=logprobs, prompt_logprobs=positions)
        for index in range(num_choices)
    ]
    return CompletionResponse(
        id="1",
        created=2,
        model="m",
        choices=choices,
        usage=Usage(1, 2, 3, PromptTokensDetails(0, 0, 1)),
        system_fingerprint="",
    )


@pytest.mark.parametrize(("num_choices", "num_tokens"), [(1, 3), (1, SLICE), (2, SLICE + 1), (SLICE + 1, 1), (1, 2000)])
def test_slices_make_the_same_bytes(num_choices: int, num_tokens: int) -> None:
    value = answer(num_choices, num_tokens)
    assert encode(value) == msgspec.json.encode(value)


def test_parts_of_a_large_response_become_json_one_after_the_other() -> None:
    def outputs(num_tokens: int) -> list[RequestOutput]:
        completion = CompletionOutput(index=0, text="", token_ids=[0] * num_tokens)
        return [
            RequestOutput(request_id="1", prompt=None, prompt_token_ids=[], outputs=[completion], finished=True),
        ]

    [choice] = answer(1, 2000).choices
    part, expected = choice.logprobs, msgspec.json.encode(choice.logprobs)
    assert part is not None
    assert packing(outputs(1))(part) is part
    made = packing(outputs(2000))(part)
    assert msgspec.json.encode(made) == expected
    assert isinstance(made.top_logprobs, msgspec.Raw)  # type: ignore[union-attr]
    assert part.top_logprobs == [], "its objects are freed"


def test_what_was_sent_is_freed_object_by_object() -> None:
    value = answer(2, 3)
    [choice, _] = value.choices
    free(value)
    assert (value.choices, choice.prompt_logprobs, choice.logprobs.top_logprobs) == ([], [], [])  # type: ignore[union-attr]
    assert choice.logprobs.tokens == ["ä"] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize(("num_choices", "num_tokens"), [(256, 8), (16, 100), (2, 500)])
def test_no_call_encodes_many_short_lists(num_choices: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, sizes, encode_whole = msgspec.json.encode(answer(num_choices, num_tokens)), [], msgspec.json.encode

    def encode_noted(value: object) -> bytes:
        sizes.append(len(encode_whole(value)) if isinstance(value, list) else 0)
        return encode_whole(value)

    monkeypatch.setattr(msgspec.json, "encode", encode_noted)
    assert encode(answer(num_choices, num_tokens)) == expected
    assert 0 < max(sizes) < 100 * SLICE < len(expected)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens", "num_logprobs", "expected"),
    [
        (0, SLICE, 1, False),
        (0, SLICE + 1, 0, True),
        (SLICE, 1, 1, True),
        (60, 60, 20, False),
        (2, 200, 21, True),
        (2, 2, 3000, True),
    ],
)
def test_large_responses_are_those_of_many_tokens_or_many_logprobs(
    num_prompt_tokens: int, num_tokens: int, num_logprobs: int, expected: bool
) -> None:
    position = {i: Logprob(-0.5, i + 1, "a") for i in range(num_logprobs)}
    output = RequestOutput(
        request_id="1",
        prompt=None,
        prompt_token_ids=[0] * num_prompt_tokens,
        outputs=[CompletionOutput(index=0, text="", token_ids=[0] * num_tokens, logprobs=[position] * num_tokens)],
        finished=True,
        prompt_logprobs=[None, *[position] * (num_prompt_tokens - 1)] if num_prompt_tokens else None,
    )
    assert is_large([output]) == expected


def test_large_responses_are_built_in_a_thread() -> None:
    async def run() -> None:
        assert await LargeResponses().build(threading.get_ident) != threading.get_ident()

    asyncio.run(run())
