"""The core behind a socket: `serve_core` in a thread, and the real process with bad and good configurations."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from octavo.core.messages import AbortRequests, CoreFailed, EngineCoreRequest, StepOutputs, StopSequence
from octavo.core.sampling_params import SamplingParams
from octavo.engine import frames
from octavo.engine.core_client import Core, ProcessClient
from octavo.engine.core_process import report_failure, serve_core
from octavo.errors import CheckpointError, ConfigError, EngineDeadError, RequestFailed
from tests.fakes.core import ScriptedCore, endless, engine_config

pytestmark = pytest.mark.anyio


def make_request(request_id: str, text: str = "abc", **params: object) -> EngineCoreRequest:
    values = {"max_tokens": 100, "seed": 0, "logit_bias": {5: 1.0}, "stop": ("x",), **params}
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(text.encode()),
        params=SamplingParams(**values),  # type: ignore[arg-type]
        arrival_time=0.0,
    )


@asynccontextmanager
async def served(core: Core) -> AsyncIterator[ProcessClient]:
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                serve_core(core, theirs)
            except RuntimeError as error:
                report_failure(theirs, CoreFailed(message=str(error)))

    thread = threading.Thread(target=serve)
    thread.start()
    client = await ProcessClient.connect(ours)
    try:
        yield client
    finally:
        await client.shutdown()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive(), "the core does not end"


async def outputs_until_idle(client: ProcessClient) -> list[StepOutputs]:
    steps = [await client.receive()]
    while steps[-1].outputs or steps[-1].stats.num_running:
        steps.append(await client.receive())
    return steps


async def test_requests_travel_whole_and_outputs_come_back() -> None:
    core = ScriptedCore()
    async with served(core) as client:
        assert client.ready == core.ready
        request = make_request("r")
        client.send(request)
        steps = await outputs_until_idle(client)
        assert core.requests == {"r": request}
    token_ids = [delta.token_ids for step in steps for output in step.outputs for delta in output.deltas]
    assert token_ids == [[97], [98], [99]]
    assert steps[-1].stats.num_generated_tokens == 3


async def test_last_word_before_sleep_says_that_nothing_runs() -> None:
    core = ScriptedCore(reply=endless)
    async with served(core) as client:
        client.send(make_request("r", n=2))
        await client.receive()
        client.send(StopSequence("r", 0))
        client.send(AbortRequests(["r"]))
        steps = await outputs_until_idle(client)
        assert steps[-1].stats.num_running == 0
    assert (core.stopped, core.aborted) == ([("r", 0)], ["r"])


async def test_idle_core_takes_no_steps() -> None:
    core = ScriptedCore()
    async with served(core) as client:
        client.send(make_request("r"))
        await outputs_until_idle(client)
        num_steps = core.num_steps
        await asyncio.sleep(0.05)
        assert core.num_steps == num_steps


async def test_calls_are_answered_by_name_while_requests_run() -> None:
    async with served(ScriptedCore()) as client:
        receiver = asyncio.create_task(client.receive())
        assert await client.call("reset_prefix_cache") is True
        with pytest.raises(RequestFailed, match="format_disk is not a control call"):
            await client.call("format_disk")
        receiver.cancel()


async def test_dying_core_leaves_its_last_words() -> None:
    async with served(ScriptedCore(fail_at_step=1)) as client:
        client.send(make_request("r"))
        call = asyncio.create_task(client.call("reset_prefix_cache"))
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            await client.receive()
        await asyncio.wait([call])
        assert isinstance(call.exception(), EngineDeadError) or call.result() is not None
        assert not client.is_running
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            client.send(make_request("s"))


async def test_core_ends_when_its_front_goes_away() -> None:
    core = ScriptedCore(reply=endless)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve_core, args=(core, theirs))
    thread.start()
    client = await ProcessClient.connect(ours)
    client.send(make_request("r"))
    await client.receive()
    client._writer.transport.abort()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    theirs.close()


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


@pytest.mark.slow
async def test_real_process_reports_a_bad_checkpoint_without_a_traceback(
    tmp_path: object, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        await ProcessClient.start(engine_config(str(tmp_path)))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
async def test_start_that_is_given_up_leaves_no_process() -> None:
    starting = asyncio.create_task(ProcessClient.start(engine_config("/nowhere")))
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
