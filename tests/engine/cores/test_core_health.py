"""A core that is stopped or hung is found out; one that computes for long is not taken for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from octavo.core.messages import AddRequests, EngineCoreRequest, StepOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores import core_health, core_process
from octavo.engine.cores.core_health import CoreHealth
from octavo.errors import EngineDeadError, EngineUnresponsiveError
from tests.fakes.core import ScriptedCore
from tests.fakes.engine import make_core
from tests.fakes.served_core import served_core

pytestmark = pytest.mark.anyio


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


async def test_stopped_process_is_told_at_once_and_healthy_when_it_goes_on() -> None:
    with child("time.sleep(60)") as process:
        health = CoreHealth(answered, process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(EngineUnresponsiveError, match=f"kill -CONT {process.pid}"):
            await health.check()
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


async def test_process_that_computes_without_answering_is_healthy_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with child("while True: pass") as process:
        health = CoreHealth(unanswered, process.pid)
        for _ in range(2):
            await asyncio.wait_for(health.check(), 100)
        monkeypatch.setattr(core_health, "_BUSY_S", 0.0)
        with pytest.raises(EngineUnresponsiveError, match="without a response"):
            await health.check()
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


@pytest.mark.parametrize("is_hung", [False, True])
async def test_core_answers_a_ping_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, is_hung: bool) -> None:
    monkeypatch.setattr(core_process, "HUNG_AFTER_S", -1.0 if is_hung else 60.0)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedCore):
        def step(self) -> StepOutputs:
            begun.set()
            assert go_on.wait(100)
            return super().step()

    async with served_core(Slow()) as client:
        receiver = asyncio.create_task(client.receive())
        params = SamplingParams(max_tokens=1, seed=0)
        request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], params=params, arrival_time=0.0)
        client.send(AddRequests([request]))
        await asyncio.to_thread(begun.wait, 100)
        if is_hung:
            with pytest.raises(EngineUnresponsiveError, match=r"has been in one step for \d+ s"):
                await client.check_health()
        else:
            await client.check_health()
        go_on.set()
        await receiver


async def test_dead_core_is_dead_and_not_hung() -> None:
    async with served_core(ScriptedCore()) as client:
        await client.shutdown()
        with pytest.raises(EngineDeadError):
            await client.check_health()


def test_longest_step_goes_by_the_measured_rate_and_is_generous_before_there_is_one() -> None:
    measured = make_core(prefill_tokens_per_s=512.0, max_num_batched_tokens=2048)
    assert measured.longest_step_s() == 4.0
    assert make_core(max_num_batched_tokens=2048).longest_step_s() > 100
