"""The core's loop behind a socket: it works while there is work, sleeps when there is none, and ends with its front."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from octavo.core.messages import (
    AbortRequests,
    AddRequests,
    Call,
    CoreFailed,
    SchedulerStats,
    StepOutputs,
    StopSequence,
    Wake,
)
from octavo.core.process import frames
from octavo.core.process.processes import report_failure
from octavo.engine.cores import core_process
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_process import CoreServer, Inbox, build_and_serve, collect_rarely, serve_core
from octavo.errors import EngineDeadError
from tests.fakes.core import ScriptedCore, endless, engine_config
from tests.fakes.engine import make_core, run_alone
from tests.fakes.engine import make_request as make_hash_request
from tests.fakes.engine import run as run_core
from tests.fakes.executor import HashExecutor
from tests.fakes.prefix_source import ToySource
from tests.fakes.served_core import served_core

pytestmark = pytest.mark.anyio


make_request = partial(make_hash_request, prompt=b"abc", max_tokens=100, logit_bias={5: 1.0}, stop=("x",))


async def outputs_until_idle(client: ProcessClient) -> list[StepOutputs]:
    steps = [await client.receive()]
    while steps[-1].outputs or steps[-1].stats.num_running:
        steps.append(await client.receive())
    return steps


async def test_requests_travel_whole_and_outputs_come_back() -> None:
    core = ScriptedCore()
    async with served_core(core) as client:
        assert client.ready == core.ready
        request = make_request("r")
        client.send(AddRequests([request]))
        steps = await outputs_until_idle(client)
        assert core.requests == {"r": request}
    token_ids = [delta.token_ids for step in steps for output in step.outputs for delta in output.deltas]
    assert token_ids == [[97], [98], [99]]
    assert steps[-1].stats.num_generated_tokens == 3


async def test_last_word_before_sleep_says_that_nothing_runs() -> None:
    core = ScriptedCore(reply=endless)
    async with served_core(core) as client:
        # more than it can produce meanwhile: nothing but the abort ends it, so nothing is said before that is heard
        client.send(AddRequests([make_request("r", n=2, max_tokens=10**9)]))
        await client.receive()
        client.send(StopSequence("r", 0))
        client.send(AbortRequests(["r"]))
        steps = await outputs_until_idle(client)
        assert steps[-1].stats.num_running == 0
    assert (core.stopped, core.aborted) == ([("r", 0)], ["r"])


class SlowSource(ToySource):
    """Fetches end when `is_there` is set."""

    def __init__(self) -> None:
        super().__init__(most_steps=1)
        self.is_there = threading.Event()

    def take_fetched(self) -> list[tuple[int, str]]:
        return super().take_fetched() if self.is_there.is_set() else []


async def test_a_core_waits_without_steps_while_requests_only_fetch() -> None:
    source, inbox = SlowSource(), SimpleQueue[Any]()
    core, num_steps = make_core(source=source), 0
    step = core.step
    assert isinstance(core.executor, HashExecutor)
    source.executor = core.executor

    def counted_step() -> StepOutputs:
        nonlocal num_steps
        num_steps += 1
        return step()

    core.step = counted_step  # type: ignore[method-assign]
    request = make_hash_request("r", range(30), max_tokens=5)
    source.learn(request)
    async with served_core(core, inbox) as client:
        client.send(AddRequests([request]))
        while not core.is_waiting:
            await asyncio.sleep(0.001)
        before = num_steps
        await asyncio.sleep(0.1)
        assert (num_steps, core.has_unfinished()) == (before, True)
        source.is_there.set()
        inbox.put(Wake())
        steps = await outputs_until_idle(client)
    token_ids = [token for each in steps for output in each.outputs for token in output.deltas[0].token_ids]
    assert token_ids == run_alone(request).token_ids["r"][0]
    assert steps[-2].outputs[0].num_fetched_tokens == 29


async def test_what_waits_for_the_end_of_a_sleep_is_counted() -> None:
    core, inbox = make_core(), SimpleQueue[Any]()
    core.sleep.begin()
    async with served_core(core, inbox) as client:
        for number in range(1, 4):
            client.send(AddRequests([make_hash_request(str(number), range(9), max_tokens=5)]))
            step = await client.receive()
            assert (step.outputs, step.stats.num_waiting) == ([], number)
        inbox.put(core.sleep.end)
        steps = await outputs_until_idle(client)
    assert {output.request_id for each in steps for output in each.outputs} == {"1", "2", "3"}


async def test_an_idle_core_steps_once_when_it_is_woken() -> None:
    core, inbox = ScriptedCore(), SimpleQueue[Any]()
    async with served_core(core, inbox) as client:
        inbox.put(Wake())
        assert (await client.receive()).outputs == []
        assert core.num_steps == 1


async def test_idle_core_takes_no_steps() -> None:
    core = ScriptedCore()
    async with served_core(core) as client:
        client.send(AddRequests([make_request("r")]))
        await outputs_until_idle(client)
        num_steps = core.num_steps
        await asyncio.sleep(0.05)
        assert core.num_steps == num_steps


class ReleasingCore(ScriptedCore):
    """Counts how often it gave memory back."""

    num_releases = 0

    def call(self, method: str, *arguments: Any) -> Any:
        assert method == "release_memory"
        self.num_releases += 1


async def test_a_core_that_stays_idle_gives_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "RELEASE_AFTER_S", 0.02)
    core = ReleasingCore()
    async with served_core(core) as client:
        await asyncio.sleep(0.1)
        assert core.num_releases == 0  # it has not worked yet
        for num_releases in (1, 2):
            client.send(AddRequests([make_request(f"r{num_releases}")]))
            await outputs_until_idle(client)
            for _ in range(500):
                if core.num_releases == num_releases:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert core.num_releases == num_releases


async def test_the_death_of_a_rank_ends_an_idle_core() -> None:
    inbox: Inbox = SimpleQueue()
    async with served_core(ScriptedCore(), inbox) as client:
        inbox.put(CoreFailed(message="rank 1 was killed"))
        with pytest.raises(EngineDeadError, match="rank 1 was killed"):
            await client.receive()


class HeldCore(ScriptedCore):
    """Is released when `may_end` is set."""

    def __init__(self) -> None:
        super().__init__(fail_at_step=1)
        self.may_end = threading.Event()

    def shutdown(self) -> None:
        self.is_shut_down = self.may_end.wait(100)


async def built_and_served(build: Callable[..., Any], connection: socket.socket) -> int:
    def serve(core: Any, inbox: Inbox) -> None:
        serve_core(core, connection, inbox=inbox)

    return await asyncio.to_thread(build_and_serve, build, serve, partial(report_failure, connection))


async def test_the_front_is_sent_a_failure_before_the_core_is_released() -> None:
    core: Any = HeldCore()
    ours, theirs = socket.socketpair()
    with theirs:
        serving = asyncio.create_task(built_and_served(lambda *_: core, theirs))
        client = await ProcessClient.connect(ours)
        client.send(AddRequests([make_request("r")]))
        with pytest.raises(EngineDeadError, match="the fake core fails"):
            await client.receive()
        core.may_end.set()
        assert await serving == 1
        await client.shutdown()
    assert core.is_shut_down


async def test_the_death_of_a_rank_ends_a_core_that_waits_for_it_while_built(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, exit_codes = threading.Event(), SimpleQueue[int]()
    monkeypatch.setattr(core_process, "UNBUILT_S", 0.05)
    monkeypatch.setattr(core_process.os, "_exit", exit_codes.put)

    def build(on_death: Callable[[str], None], _: Callable[[], None]) -> Any:
        on_death("rank 1 was killed")
        may_end.wait(100)
        return ScriptedCore()

    ours, theirs = socket.socketpair()
    with theirs:
        serving = asyncio.create_task(built_and_served(build, theirs))
        with pytest.raises(EngineDeadError, match="rank 1 was killed"):
            await ProcessClient.connect(ours)
        assert await asyncio.to_thread(exit_codes.get, timeout=100) == 1
        may_end.set()
        await serving


async def test_core_ends_when_its_front_goes_away() -> None:
    core = ScriptedCore(reply=endless)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve_core, args=(core, theirs))
    thread.start()
    client = await ProcessClient.connect(ours)
    client.send(AddRequests([make_request("r")]))
    await client.receive()
    client._writer.transport.abort()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    theirs.close()


_COLLECTOR = """
import gc, sys
from octavo.engine.cores import core_process
core_process.import_ahead = lambda: print(gc.isenabled())
core_process.build_core = lambda *_, **__: ScriptedCore()
core_process.serve_core = lambda *_, **__: print(gc.isenabled(), gc.get_freeze_count() > 10_000)
from tests.fakes.core import ScriptedCore
sys.exit(core_process.main())
"""


def test_garbage_is_collected_once_the_core_is_there_and_never_among_what_was_loaded(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.pack(engine_config(str(tmp_path))))
        command = [sys.executable, "-c", _COLLECTOR, str(theirs.fileno())]
        run = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.split()) == (0, ["False", "True", "True"]), run.stderr


def test_requests_are_announced_before_the_step_that_begins_them() -> None:
    core, said = make_core(), []

    def say(message: StepOutputs) -> None:
        assert not message.outputs
        said.append((message.began, message.stats.num_steps))

    core.announce = say
    run_core(core, [make_hash_request("a", range(5), max_tokens=3), make_hash_request("b", range(30), max_tokens=3)])
    assert said == [(["a"], 1), (["b"], 2)]
    run_core(core, [make_hash_request("c", range(5), max_tokens=3)])
    assert [began for began, _ in said[2:]] == [["c"]]


def test_no_step_waits_while_what_waits_is_searched_for_garbage() -> None:
    searched: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        searched.append(info["generation"])

    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own: those of all tests would search no more either
    gc.callbacks.append(note)
    try:
        collect_rarely()
        kept = [[number] for number in range(100_000)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(kept) == 100_000
    assert set(searched) == {0}


@pytest.mark.parametrize(("method", "is_looked_at"), [("is_paused", True), ("wake_up", False), ("profile", False)])
def test_calls_that_take_as_long_as_a_disk_are_no_steps_that_hang(
    monkeypatch: pytest.MonkeyPatch, method: str, is_looked_at: bool
) -> None:
    monkeypatch.setattr(core_process, "HUNG_AFTER_S", 0.0)
    found: list[str | None] = []

    class Core:
        def longest_step_s(self) -> float:
            return 0.0

        def stats(self) -> SchedulerStats:
            return SchedulerStats()

        def call(self, *_: Any) -> None:
            found.append(server._overdue())

    inbox: Inbox = SimpleQueue()
    core: Any = Core()
    server = CoreServer(core, lambda _: None, inbox)
    inbox.put(Call(1, method, [None]))
    (message,) = server._messages(None)
    assert not isinstance(message, CoreFailed)
    assert not callable(message)
    server._hand_over(message)
    assert [each is not None for each in found] == [is_looked_at]
