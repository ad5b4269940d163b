"""Processes of engine cores that are started before it is known what they will run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.errors import CheckpointError
from tests.fakes.checkpoints import make_checkpoint
from tests.worker.engine_config import make_config

pytestmark = [pytest.mark.anyio, pytest.mark.cold]


def test_a_core_without_a_front_ends() -> None:
    with SpawnedCore() as core:
        assert core.process.poll() is None
    assert core.process.returncode == 0


def test_a_core_that_was_stopped_by_a_signal_ends_by_itself() -> None:
    with SpawnedCore() as core:
        core.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, core.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert core.process.returncode == 0, "neither terminated nor killed"


async def test_a_core_that_waited_runs_the_engine_that_it_is_given(tmp_path: Path) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"), num_gpu_blocks_override=30)
    with SpawnedCore() as core:
        await asyncio.sleep(0.1)
        client = await ProcessClient.start(config, core)
    assert client.ready.cache.num_blocks == 30
    assert core.process.poll() is None
    await client.shutdown()
    assert core.process.returncode == 0


async def test_a_wrong_model_ends_the_core_that_waits_for_it(tmp_path: Path) -> None:
    core = SpawnedCore()
    with pytest.raises(CheckpointError):
        await AsyncLLM.start(EngineArgs(model=str(tmp_path)), core)
    assert core.process.returncode == 0


def test_what_every_core_needs_is_imported_while_it_waits() -> None:
    code = """
import sys, time
from octavo.executor.executor import import_ahead
assert "torch" not in sys.modules
import_ahead()
deadline = time.monotonic() + 60
while "octavo.worker.worker" not in sys.modules and time.monotonic() < deadline:
    time.sleep(0.01)
import octavo.worker.worker
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
