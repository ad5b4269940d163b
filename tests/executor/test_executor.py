from __future__ import annotations

import gc
import logging
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from octavo.config.device_args import ParallelArgs
from octavo.config.schema import EngineConfig
from octavo.core.process import processes
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.executor import EXECUTORS, make_executor
from octavo.worker.worker import Worker
from tests.fakes.checkpoints import make_checkpoint
from tests.worker.engine_config import make_config
from tests.worker.prefix_model import new_sequence, row, step


def started(config: EngineConfig) -> Worker:
    executor = make_executor(config)
    assert isinstance(executor, Worker)
    (plan,) = executor.call("prepare")
    executor.call("load", plan.max_model_len, [plan.cache.num_host_blocks])
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


def test_sizes_are_checked_before_ranks_beyond_processors_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(make_checkpoint("llama", tmp_path / "model"), tensor_parallel_size=1000)
    monkeypatch.setattr(processes, "spawn", lambda *_: pytest.fail("a rank is started"))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1000, must divide"):
        make_executor(config)


def test_another_executor_is_a_function_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As "How to add an executor" in CONTRIBUTING.md says; the name is one that the option has."""
    config = make_config(make_checkpoint("llama", tmp_path / "model"), tensor_parallel_size=2, executor="ray")
    monkeypatch.setitem(EXECUTORS, "ray", f"{__name__}:start_nothing")
    assert make_executor(config, print) == (config, print, None)


def start_nothing(*given: Any) -> Any:
    return given


def test_the_option_has_the_executors() -> None:
    assert get_args(get_type_hints(ParallelArgs)["executor"]) == tuple(EXECUTORS)


def test_the_second_start_maps_packed_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    config = make_config(path, num_gpu_blocks_override=30, packed_cache=str(tmp_path / "packed"))
    with caplog.at_level(logging.INFO, "octavo"):
        for _ in range(2):
            executor = started(config)
            assert executor._ahead.packed is not None
            executor._ahead.packed.close(60.0)
            executor.shutdown()
    assert [message.partition(" in ")[0].partition(" from ")[0] for message in caplog.messages] == [
        "packed weights kept",
        "packed weights mapped",
    ]


def test_nothing_that_reads_ahead_imports_torch() -> None:
    code = "import octavo.worker.start.ahead, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_step_raises_is_in_its_future_and_the_executor_is_dead_afterwards(tmp_path: Path) -> None:
    executor = started(make_config(make_checkpoint("llama", tmp_path / "model")))
    failed = executor.submit(step(rows=[row(7, 0, 1)]))  # a sequence that it does not know
    with pytest.raises(KeyError, match="7"):
        failed.result()
    for later in (lambda: executor.submit(step()).result(), lambda: executor.call("op_choices")):
        with pytest.raises(EngineDeadError, match="failed in an earlier step: KeyError: 7"):
            later()


def test_a_worker_that_is_shut_down_holds_no_memory(tmp_path: Path) -> None:
    executor = started(make_config(make_checkpoint("llama", tmp_path / "model")))
    runner = weakref.ref(executor._runner)
    executor.shutdown()
    gc.collect()
    assert runner() is None


def test_only_the_named_methods_can_be_called(tmp_path: Path) -> None:
    executor = make_executor(make_config(make_checkpoint("llama", tmp_path / "model")))
    with pytest.raises(ConfigError, match="submit is not a call"):
        executor.call("submit", step())


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
