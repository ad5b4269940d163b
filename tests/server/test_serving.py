"""A server's life: its address, its end by signal, its end with the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.core.messages import SchedulerStats
from octavo.engine.cores.replicas import Replicas
from octavo.errors import CheckpointError, ConfigError
from octavo.server.app import loading_app
from octavo.server.http.sockets import bind, listening, url_of
from octavo.server.sending import OpenRequests
from octavo.server.serving import HttpServer, StopSignals, describe_load, log_load, serve, serve_on, unless_stopped
from tests.server.conftest import Served
from tests.server.fake_llm import MAX_MODEL_LEN, FakeAsyncLLM
from tests.server.raw import Answer, ask, connect, events, eventually

Start = Callable[..., Served]
HEADERS = {"Content-Type": "application/json"}


def open_stream(connection: Any, **fields: Any) -> Any:
    """The response to a streamed completion whose first event has come."""
    body = {"prompt": "a", "stream": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    response = connection.getresponse()
    first = response.readline()
    assert first.startswith(b"data: ")
    return response


def url_address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def test_the_port_is_reserved_and_one_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: another program uses this port"):
            serve(EngineArgs(model="/no/such/model"), ServerArgs(port=port))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="another program uses this port"):
            bind("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_api_servers_share_their_port_with_no_other_program() -> None:
    with listening(ServerArgs(port=0, api_server_count=2)) as listener:
        port = listener.getsockname()[1]
        with bind("127.0.0.1", port, is_shared=True), bind("127.0.0.1", port, is_shared=True):  # two of its own
            for count in (1, 2):
                with pytest.raises(ConfigError, match="another program uses this port"):
                    serve(EngineArgs(model="/no/such/model"), ServerArgs(port=port, api_server_count=count))


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        bind(host, 0)


def test_name_of_this_machine_is_its_older_address() -> None:
    with bind("localhost", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


@pytest.mark.anyio
async def test_signal_while_the_model_loads_gives_the_start_up() -> None:
    signals = StopSignals()
    starting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(signals.stop)
    assert await unless_stopped(starting, signals) is None
    assert starting.cancelled()


@pytest.mark.anyio
async def test_server_responds_while_its_model_loads_and_says_so() -> None:
    llm = FakeAsyncLLM()
    app = loading_app(ServerArgs(port=0))
    with bind("127.0.0.1", 0) as listener:
        server, url = HttpServer(app, listener), url_of(listener)
        await server.start()

        async def answer(path: str) -> Answer:
            return await asyncio.to_thread(ask, url, path)

        assert (await answer("/v1/models")).error["code"] == "model_loading"
        app.context.load(llm.config)
        [model, _] = (await answer("/v1/models")).json["data"]
        assert (model["id"], model["max_model_len"]) == ("letters", MAX_MODEL_LEN)
        for path in ("/health", "/ready", "/ping", "/tokenizer_info"):
            refusal = await answer(path)
            assert (refusal.status, refusal.error["code"]) == (503, "model_loading")
            assert refusal.headers["retry-after"] == "5"
            assert "the model letters is loading" in refusal.error["message"]
        for path in ("/version", "/", "/load"):
            assert (await answer(path)).status == 200
        app.context.attach(cast(AsyncLLM, llm))
        for path in ("/health", "/ready", "/ping", "/v1/models"):
            assert (await answer(path)).status == 200
        app.context.open_requests.is_closing = True
        assert [(await answer(path)).status for path in ("/health", "/ready")] == [200, 503]
        await server.close(StopSignals(), grace_s=0)


@pytest.mark.anyio
async def test_hangup_reads_keys_again_and_does_not_end_the_server() -> None:
    hung_up = asyncio.Event()
    StopSignals().listen(hung_up.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(hung_up.wait(), 100)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.mark.anyio
async def test_start_that_fails_raises_its_error() -> None:
    starting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    starting.set_exception(ConfigError("no such model"))
    with pytest.raises(ConfigError, match="no such model"):
        await unless_stopped(starting, StopSignals())


def test_a_program_that_serves_hears_its_signals_afterwards() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before, args = [signal.getsignal(number) for number in numbers], ServerArgs(port=0)
    with listening(args) as listener, pytest.raises(CheckpointError, match="/nowhere"):
        serve_on(listener, EngineArgs(model="/nowhere"), loading_app(args), Replicas.start)
    assert [signal.getsignal(number) for number in numbers] == before


def test_ready_line_tells_model_api_and_page(start_server: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server()
    eventually(lambda: ask(server.url, "/health").status == 200)
    served, page = capsys.readouterr().out.splitlines()
    assert served == f"octavo serves letters as letters, alias at {server.url}/v1"
    assert page == f"to try it in a browser, open {server.url}/"


def test_idle_server_stops_at_once_with_exit_code_0(start_server: Start) -> None:
    server = start_server(shutdown_timeout_s=60.0)
    with connect(server.url) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()
        started_at = time.monotonic()
        assert server.stop() == 0
    assert time.monotonic() - started_at < 30


def test_open_streams_may_finish_after_a_signal(start_server: Start) -> None:
    server = start_server(shutdown_timeout_s=100.0)
    server.llm.token_interval_s = 0.01
    with connect(server.url) as connection:
        response = open_stream(connection, max_tokens=30)
        assert server.stop() == 0
        assert events(b"data: {}\n" + response.read())[-1] == "[DONE]"
    assert server.llm.aborted == []
    with pytest.raises(ConnectionRefusedError):
        ask(server.url, "/health")


def test_requests_of_a_paused_engine_go_on_to_their_end_after_a_signal(start_server: Start) -> None:
    server = start_server(shutdown_timeout_s=100.0)
    server.llm.token_interval_s = 0.01
    with connect(server.url) as connection:
        response = open_stream(connection, max_tokens=30)
        assert ask(server.url, "/pause?mode=keep", b"").status == 200
        assert server.llm.paused
        assert server.stop() == 0
        assert server.llm.paused is None
        assert events(b"data: {}\n" + response.read())[-1] == "[DONE]"


@pytest.mark.parametrize(
    "sent",
    [
        b"this is not HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_what_is_not_asked_in_http_leaves_no_line_in_the_log(
    start_server: Start, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    with socket.create_connection(url_address(server.url), timeout=100) as connection:
        connection.sendall(sent)
        assert connection.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 200")
    assert caplog.records == []


def die(server: Served) -> int:
    server.on_loop(server.llm.die, "killed by signal 9")
    return server.join()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("end", "exit_code", "code", "message"),
    [
        (Served.stop, 0, "server_shutting_down", "the server is shutting down"),
        (die, 1, "engine_dead", "the engine has stopped: killed by signal 9"),
    ],
)
def test_requests_that_are_open_at_the_end_of_server_or_engine_get_an_error(
    start_server: Start, end: Callable[[Served], int], exit_code: int, code: str, message: str, stream: bool
) -> None:
    server = start_server(shutdown_timeout_s=0.1)
    server.llm.hold_after = 1
    with connect(server.url) as connection:
        if stream:
            response = open_stream(connection)
        else:
            connection.request("POST", "/v1/completions", '{"prompt": "a"}', HEADERS)
            eventually(lambda: server.llm.requests)
        assert end(server) == exit_code
        if stream:
            error = events(b"data: {}\n" + response.read())[-1]["error"]
        else:
            response = connection.getresponse()
            assert response.status == 503
            error = json.loads(response.read())["error"]
    assert (error["code"], error["type"], error["message"]) == (code, "server_error", message)
    assert len(server.llm.aborted) == (exit_code == 0)


def test_second_signal_ends_open_streams_at_once(start_server: Start) -> None:
    server = start_server(shutdown_timeout_s=3600.0)
    server.llm.hold_after = 1
    with connect(server.url) as connection:
        response = open_stream(connection)
        server.on_loop(server.signals.stop)
        time.sleep(0.3)
        assert server.exit_code is None
        assert server.stop() == 0
        assert b"server_shutting_down" in response.read()


def test_clients_that_neither_read_nor_send_do_not_delay_shutdown(start_server: Start) -> None:
    server = start_server(shutdown_timeout_s=0.1)
    server.llm.endless = True
    with connect(server.url) as reads_not, connect(server.url) as asks_not:
        body = json.dumps({"prompt": "a", "stream": True})
        reads_not.request("POST", "/v1/completions", body, HEADERS)
        asks_not.putrequest("POST", "/v1/completions")
        asks_not.putheader("Content-Type", "application/json")
        asks_not.putheader("Content-Length", "100")
        asks_not.endheaders(b"{")

        def stands_still() -> bool:
            before = server.llm.num_outputs
            time.sleep(0.1)
            return before == server.llm.num_outputs > 0

        eventually(stands_still)
        assert server.stop() == 0
    assert len(server.llm.aborted) == 1


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
    caplog.set_level(logging.INFO, "octavo.server.serving")
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
