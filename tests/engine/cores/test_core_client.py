"""The front's end of the socket: results of calls, the failure of a dead core, and no process left behind."""

from __future__ import annotations

import asyncio
import signal
import socket
from functools import partial

import pytest
import uvloop

from octavo.core.messages import AddRequests, CoreFailed
from octavo.core.process import frames
from octavo.engine.cores import core_client
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.errors import CheckpointError, ConfigError, EngineDeadError, RequestFailed
from tests.fakes import engine as fakes
from tests.fakes.core import ScriptedCore, core_ready, engine_config
from tests.fakes.served_core import served_core

pytestmark = pytest.mark.anyio


make_request = partial(fakes.make_request, prompt=b"abc", max_tokens=100, logit_bias={5: 1.0}, stop=("x",))


async def test_calls_are_answered_by_name_while_requests_run() -> None:
    async with served_core(ScriptedCore()) as client:
        receiver = asyncio.create_task(client.receive())
        assert await client.call("reset_prefix_cache") is True
        with pytest.raises(RequestFailed, match="format_disk is not a control call"):
            await client.call("format_disk")
        receiver.cancel()


async def test_dying_core_leaves_its_last_words() -> None:
    async with served_core(ScriptedCore(fail_at_step=1)) as client:
        client.send(AddRequests([make_request("r")]))
        call = asyncio.create_task(client.call("reset_prefix_cache"))
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            await client.receive()
        await asyncio.wait([call])
        assert isinstance(call.exception(), EngineDeadError) or call.result() is not None
        assert not client.is_running
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            client.send(AddRequests([make_request("s")]))


async def test_core_that_cannot_start_says_why_in_its_own_class() -> None:
    for failure, kind in (
        (CoreFailed(message="no such place", kind="ConfigError"), ConfigError),
        (CoreFailed(message="no such place"), EngineDeadError),
        (CoreFailed(message="no such place", kind="suggestion"), EngineDeadError),
    ):
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(frames.pack(failure))
            with pytest.raises(kind, match="no such place") as caught:
                await ProcessClient.connect(ours)
            assert type(caught.value) is kind


async def test_front_that_closes_before_the_core_is_ready_is_told() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(EngineDeadError, match="closed its connection"):
        await ProcessClient.connect(ours)


async def test_a_core_that_sends_something_else_than_messages_has_died() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(frames.pack(core_ready()) + frames.pack({"type": "unknown"}))
        client = await ProcessClient.connect(ours)
        with pytest.raises(EngineDeadError, match="the engine core has sent data that is no message"):
            await client.receive()
        assert not client.is_running
        await client.shutdown()


@pytest.mark.slow
async def test_real_process_reports_a_bad_checkpoint(tmp_path: object, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        await ProcessClient.start(engine_config(str(tmp_path)))
    assert "Traceback" not in capfd.readouterr().err


async def test_core_that_is_stopped_while_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_client, "STOPPED_S", 0.05)
    core = SpawnedCore()
    core.process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="stopped by a signal or a debugger while it started"):
        await ProcessClient.start(engine_config("/nowhere"), core)
    assert core.process.poll() is not None


async def test_core_that_hangs_while_it_starts_is_ended() -> None:
    core = SpawnedCore()  # it waits for its configuration, which does not come
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_client, "STOPPED_S", 0.5)
        with pytest.raises(EngineDeadError, match="nor used processor time for 1.5 s while it started"):
            await ProcessClient.connect(core.connection, core, max_idle_s=1.2)
    await asyncio.to_thread(core.end, 0.0)


def test_messages_to_a_core_that_has_gone_are_dropped_until_its_death_is_read() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(frames.pack(core_ready()))
            client = await ProcessClient.connect(ours)
        for number in range(3):
            client.send(AddRequests([make_request(f"r{number}")]))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="has closed its connection"):
            await client.receive()
        await client.shutdown()

    for loop_factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())


@pytest.mark.slow
async def test_start_that_is_given_up_leaves_no_process() -> None:
    starting = asyncio.create_task(ProcessClient.start(engine_config("/nowhere")))
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
