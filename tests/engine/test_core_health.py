"""A core that is stopped or hung is found out; one that computes for long is not taken for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from octavo.core.messages import EngineCoreRequest, StepOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core_health import CoreHealth
from octavo.engine.shared_work import SharedWork
from octavo.errors import EngineDeadError, EngineUnresponsiveError
from tests.fakes.core import ScriptedCore
from tests.fakes.served_core import served_core

pytestmark = pytest.mark.anyio


@pytest.fixture
def work() -> Iterator[SharedWork]:
    record = SharedWork.create()
    yield record
    record.close()


def child(code: str) -> subprocess.Popen[bytes]:
    """A Python process that has printed a line, and then runs `code`."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; print(flush=True)\n{code}"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


async def answered() -> None:
    """A ping that a core answers."""


async def unanswered() -> None:
    """A ping that none answers."""
    await asyncio.Event().wait()


async def test_hung_step_is_told_and_a_long_one_is_not(work: SharedWork, monkeypatch: pytest.MonkeyPatch) -> None:
    health = CoreHealth(answered, work=work)
    work.begin(step_s=1000.0)
    began_at = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began_at + 3600)
    await health.check()
    monkeypatch.setattr(time, "monotonic", lambda: began_at + 36000)
    with pytest.raises(EngineUnresponsiveError, match="in one step for 36,000 s"):
        await health.check()


async def test_stopped_process_is_told_at_once_and_healthy_when_it_goes_on() -> None:
    with child("time.sleep(60)") as process:
        health = CoreHealth(answered, process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(EngineUnresponsiveError, match=f"kill -CONT {process.pid}"):
            await asyncio.wait_for(health.check(), 1)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        await health.check()
        process.kill()


async def test_process_that_neither_answers_nor_computes_is_hung() -> None:
    with child("time.sleep(60)") as process:
        started_at = time.monotonic()
        with pytest.raises(EngineUnresponsiveError, match="neither responds nor uses processor time"):
            await CoreHealth(unanswered, process.pid).check()
        assert time.monotonic() - started_at > 1
        process.kill()


async def test_process_that_computes_without_answering_is_healthy() -> None:
    with child("while True: pass") as process:
        health = CoreHealth(unanswered, process.pid)
        for _ in range(2):
            await asyncio.wait_for(health.check(), 10)
        process.kill()


async def test_one_ping_is_under_way_whoever_asks() -> None:
    pings = 0
    answer = asyncio.Event()

    async def ping() -> None:
        nonlocal pings
        pings += 1
        await answer.wait()

    health = CoreHealth(ping)
    checks = [asyncio.create_task(health.check()) for _ in range(5)]
    await asyncio.sleep(0.05)
    answer.set()
    await asyncio.gather(*checks)
    assert pings == 1
    await health.check()
    assert pings == 2


async def test_core_answers_a_ping_in_the_middle_of_a_step() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedCore):
        def step(self) -> StepOutputs:
            begun.set()
            assert go_on.wait(20)
            return super().step()

    async with served_core(Slow()) as client:
        receiver = asyncio.create_task(client.receive())
        client.send(
            EngineCoreRequest(
                request_id="r",
                prompt_token_ids=[1],
                params=SamplingParams(max_tokens=1, seed=0),
                arrival_time=0.0,
            )
        )
        await asyncio.to_thread(begun.wait, 20)
        await client.check_health()
        go_on.set()
        await receiver


async def test_dead_core_is_dead_and_not_hung() -> None:
    async with served_core(ScriptedCore()) as client:
        await client.shutdown()
        with pytest.raises(EngineDeadError):
            await client.check_health()
