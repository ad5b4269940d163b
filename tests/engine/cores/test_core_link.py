"""A core over TCP: who may come, what becomes of requests when a front goes, and how each end names the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from octavo.core.messages import AddRequests, CoreReady
from octavo.core.process import frames
from octavo.core.process.authentication import authenticate
from octavo.engine.cores import core_link
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_link import CoreAddress, LinkHello, connect
from octavo.errors import ConfigError, EngineDeadError
from tests.fakes import engine as fakes
from tests.fakes.core import core_ready, endless
from tests.fakes.linked_core import FRONT, SECRET, LinkableCore, Served, linked

pytestmark = pytest.mark.anyio


make_request = partial(fakes.make_request, prompt=b"abc", max_tokens=10**9)


async def client_of(served: Served) -> ProcessClient:
    client, _ = await connect(served.address, SECRET, FRONT)
    return client


async def until_free(served: Served) -> ProcessClient:
    """Connect as soon as the core is done with the front before."""
    while True:
        try:
            return await client_of(served)
        except EngineDeadError as error:
            if "has this engine, which serves one at a time" not in str(error):
                raise
            await asyncio.sleep(0.01)


@asynccontextmanager
async def receiving(client: ProcessClient) -> AsyncIterator[None]:
    """Results of calls are read in the context."""

    async def receive() -> None:
        while True:
            await client.receive()

    receiver = asyncio.create_task(receive())
    yield
    receiver.cancel()


async def tokens_of(client: ProcessClient, request_id: str) -> list[int]:
    found: list[int] = []
    while True:
        for output in (await client.receive()).outputs:
            assert output.request_id == request_id
            found += [token_id for delta in output.deltas for token_id in delta.token_ids]
            if output.finished:
                return found


def test_addresses_are_read_and_written() -> None:
    assert [str(CoreAddress.read(text)) for text in ("a.b:9000", "[::1]:1")] == ["a.b:9000", "[::1]:1"]
    assert CoreAddress.read("[::1]:1").host == "::1"
    for text in ("a.b", ":9000", "a:b", "a:0", "a:65536", "http://a:1", "a..b:1"):
        with pytest.raises(ConfigError, match="is not the address of an engine; give host:port"):
            CoreAddress.read(text)


async def test_requests_are_served_over_tcp_and_the_core_outlives_its_front() -> None:
    async with linked() as served:
        for _ in range(2):
            client = await until_free(served)
            assert client.ready == served.core.ready
            client.send(AddRequests([make_request("r")]))
            assert await tokens_of(client, "r") == [97, 98, 99]
            async with receiving(client):
                assert await client.call("reset_prefix_cache") is True
            await client.shutdown()


async def test_a_front_that_vanishes_leaves_no_request_and_the_next_gets_only_its_own() -> None:
    async with linked(lambda: LinkableCore(reply=endless)) as served:
        first = await client_of(served)
        first.send(AddRequests([make_request("r"), make_request("s")]))
        await first.receive()
        first._writer.transport.abort()
        second = await until_free(served)
        assert served.core.aborted == ["r", "s"]
        second.send(AddRequests([make_request("r", max_tokens=3)]))
        assert await tokens_of(second, "r") == [97, 97, 97]
        await second.shutdown()


async def test_a_second_front_is_refused_by_name() -> None:
    async with linked() as served:
        first = await client_of(served)
        host, port = first._writer.get_extra_info("sockname")
        with pytest.raises(
            EngineDeadError, match=f"the engine at {served.address}: the front at {host}:{port} has this engine"
        ):
            await client_of(served)
        async with receiving(first):
            await first.check_health()
        await first.shutdown()


async def test_ends_that_do_not_fit_are_refused_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    async with linked() as served:
        for front, secret, message in (
            (msgspec.structs.replace(FRONT, protocol=7), SECRET, "protocol is 1 at the engine and 7 at the front"),
            (msgspec.structs.replace(FRONT, octavo="0.0"), SECRET, "octavo is .* at the engine and 0.0 at the front"),
            (msgspec.structs.replace(FRONT, model="x", config="1"), SECRET, r"model is fake \(.* c0ffee\) .* x \(1\)"),
            (FRONT, b"another secret 16", "does not know the secret of cluster_secret_file"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=message):
                await connect(served.address, secret, front)
        assert "127.0.0.1" in caplog.text
        assert "has connected without the secret" in caplog.text
        await (await client_of(served)).shutdown()  # none of them has the core


async def test_an_engine_of_another_version_is_refused_by_a_front_that_it_admits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def admit() -> None:
            connection, _ = listener.accept()
            with connection:
                assert authenticate(connection, SECRET, is_listener=True)
                frames.read(connection)
                connection.sendall(frames.pack({"type": "hello", "protocol": 2, "octavo": "9.9", "new": 1}))
                frames.read(connection)

        admitting = asyncio.create_task(asyncio.to_thread(admit))
        address = CoreAddress(*listener.getsockname())
        with pytest.raises(ConfigError, match=f"protocol is 1 at the front and 2 at {address}"):
            await connect(address, SECRET, FRONT)
        await admitting


async def test_a_client_that_is_no_front_is_disconnected_and_the_core_continues() -> None:
    async with linked() as served:
        with socket.create_connection((served.address.host, served.address.port)) as other:
            other.sendall(b"GET / HTTP/1.1\r\nHost: engine.example.org:9000\r\n".ljust(62) + b"\r\n")
            other.settimeout(100)
            while other.recv(100):
                pass
        client = await client_of(served)
        client._writer.write(frames.pack({"type": "no such message"}))
        with pytest.raises(EngineDeadError, match=f"the engine at {served.address} has closed its connection"):
            await client.receive()
        await client.shutdown()
        await (await until_free(served)).shutdown()


async def test_no_engine_at_an_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = CoreAddress(*listener.getsockname())
    with pytest.raises(EngineDeadError, match=f"no engine is at {address}: .*; start `octavo serve --role decode`"):
        await connect(address, SECRET, FRONT)


async def test_the_end_of_a_core_is_told_with_its_reason() -> None:
    async with linked(lambda: LinkableCore(fail_at_step=1)) as served:
        client = await client_of(served)
        client.send(AddRequests([make_request("r")]))
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            await client.receive()
        assert not client.was_ended
        await client.shutdown()
    async with linked() as served:
        client = await client_of(served)
        ending = asyncio.create_task(served.end())
        with pytest.raises(EngineDeadError, match="the engine was ended by a signal"):
            await client.receive()
        assert client.was_ended
        await ending
        await client.shutdown()


class TalkativeCore(LinkableCore):
    """Is ready with more text than a connection holds."""

    def __init__(self) -> None:
        super().__init__(ready=core_ready(plan="x" * (32 << 20)))


async def test_fronts_that_never_read_are_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_link, "SEND_S", 0.1)
    async with linked(TalkativeCore) as served:
        with socket.create_connection((served.address.host, served.address.port)) as stuck:
            assert authenticate(stuck, SECRET, is_listener=False)
            stuck.sendall(frames.pack(FRONT))
            body = frames.read(stuck)
            assert body is not None
            assert msgspec.msgpack.decode(body, type=LinkHello | CoreReady) == FRONT
            client = await until_free(served)
            assert "has read nothing for 0.1 s" in caplog.text
            assert client.ready == served.core.ready
            await client.shutdown()


async def test_an_engine_that_begins_with_other_than_messages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(frames.pack({"type": "unknown"}))
    monkeypatch.setattr(core_link, "_greet", lambda *_: (ours, FRONT))
    with theirs, pytest.raises(EngineDeadError, match="the engine at a:1 has sent data that is no message"):
        await connect(CoreAddress("a", 1), SECRET, FRONT)
