from __future__ import annotations

import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config.schema import EngineConfig
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.executor import make_executor
from octavo.executor.inproc import InprocExecutor
from tests.fakes.checkpoints import make_checkpoint
from tests.worker.engine_config import make_config
from tests.worker.prefix_model import new_sequence, row, step


class FailingWorker:
    """Fails at its second step."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        if self.num_steps == 2:
            raise RuntimeError("the disk is on fire")
        return ModelRunnerOutput(step_id=step.step_id, rows=[])


def started(config: EngineConfig) -> InprocExecutor:
    executor = make_executor(config)
    assert isinstance(executor, InprocExecutor)
    (plan,) = executor.call("prepare")
    assert executor.call("allocate", [plan.cache.num_blocks], [plan.cache.num_host_blocks]) == [None]
    return executor


def test_a_built_executor_runs_steps_and_answers_calls(tmp_path: Path) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"), num_gpu_blocks_override=30)
    executor = started(config)
    future = executor.submit(step([new_sequence(1, [5, 6], [1])], [row(1, 0, 2)]))
    assert future.done()
    assert len(future.result().rows[0].tokens) == 1
    assert executor.call("time_steps", False) == [None]
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.call("time_steps", False)


def test_the_second_start_maps_packed_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    config = make_config(path, num_gpu_blocks_override=30, packed_cache=str(tmp_path / "packed"))
    with caplog.at_level(logging.INFO, "octavo"):
        for _ in range(2):
            executor = started(config)
            assert executor._worker is not None
            assert executor._worker._ahead.packed is not None
            executor._worker._ahead.packed.close(60.0)
            executor.shutdown()
    assert [message.partition(" in ")[0].partition(" from ")[0] for message in caplog.messages] == [
        "packed weights kept",
        "packed weights mapped",
    ]


def test_nothing_that_reads_ahead_imports_torch() -> None:
    code = "import octavo.worker.ahead, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_step_raises_is_in_its_future_and_the_executor_is_dead_afterwards() -> None:
    executor = InprocExecutor(FailingWorker())  # type: ignore[arg-type]
    assert executor.submit(step()).result().rows == []
    failed = executor.submit(step())
    with pytest.raises(RuntimeError, match="on fire"):
        failed.result()
    for later in (lambda: executor.submit(step()).result(), lambda: executor.call("op_choices")):
        with pytest.raises(EngineDeadError, match="on fire"):
            later()


def test_only_the_named_methods_can_be_called() -> None:
    executor = InprocExecutor(FailingWorker())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="execute is not a call"):
        executor.call("execute", step())


def test_the_collector_is_as_it_was_after_a_start(tmp_path: Path) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"))
    started(config)
    assert gc.isenabled()
    gc.disable()
    try:
        started(config)
        assert not gc.isenabled()
    finally:
        gc.enable()
