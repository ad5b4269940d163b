"""What the executor of several ranks makes of what their connections bring, and of ranks that bring nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue

import msgspec
import pytest

from octavo.config.schema import EngineConfig
from octavo.core.launched import LaunchedStep
from octavo.core.messages import CoreFailed
from octavo.core.process import frames, processes
from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.channel import Start, StepResult, Value
from octavo.executor.multiprocess import MultiprocessExecutor, Rank
from octavo.worker.start.identity import Identity
from tests.executor.test_conformance import numbered
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank import FakeRank
from tests.worker.engine_config import make_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("multiprocess") / "model")
    return make_config(path, num_gpu_blocks_override=64)


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_executor(
    resources: ExitStack,
    ranks: list[Rank],
    timeout_s: float = 30.0,
    on_death: Callable[[str], None] | None = None,
    on_shutdown: Callable[[], None] = lambda: None,
) -> MultiprocessExecutor:
    executor = MultiprocessExecutor(
        ranks, result_rank=0, timeout_s=timeout_s, on_death=on_death, on_shutdown=on_shutdown
    )
    resources.callback(executor.shutdown)
    return executor


def start_of(config: EngineConfig) -> Start:
    return Start(identity=Identity.of(config), config=msgspec.Raw(frames.encode(config)), rendezvous=Rendezvous())


def connected(resources: ExitStack, count: int) -> tuple[list[Rank], list[socket.socket]]:
    """Ranks at the other ends of connections."""
    pairs = [socket.socketpair() for _ in range(count)]
    ends = [resources.enter_context(end) for _, end in pairs]
    return [Rank(number, ours, host="there") for number, (ours, _) in enumerate(pairs, start=1)], ends


def test_what_other_ranks_send_after_a_failure_is_left_aside(config: EngineConfig, resources: ExitStack) -> None:
    ranks, (first, second) = connected(resources, 2)
    executor = make_executor(resources, ranks)
    first.sendall(frames.pack(CoreFailed(message="another model", kind="ConfigError")))
    second.sendall(frames.pack(Value()) + frames.pack(StepResult(ModelRunnerOutput(step_id=1, rows=[]))))
    with pytest.raises(ConfigError, match=r"rank 1 \(at there\): another model"):
        executor.start(start_of(config), lambda: FakeRank(config, 0, None))
    executor.shutdown()  # waits for the thread that reads


def start_and_load(executor: MultiprocessExecutor, config: EngineConfig) -> None:
    executor.start(start_of(config), lambda: FakeRank(config, 0, None))
    executor.call("prepare")


@pytest.mark.parametrize("message", [Value(), StepResult(ModelRunnerOutput(step_id=1, rows=[]))])
def test_a_message_that_none_waits_for_is_a_failure_of_its_rank(resources: ExitStack, message: msgspec.Struct) -> None:
    ranks, (end,) = connected(resources, 1)
    reasons: SimpleQueue[str] = SimpleQueue()
    make_executor(resources, ranks, on_death=reasons.put)
    end.sendall(frames.pack(message))
    assert reasons.get(timeout=100) == "rank 1 (at there) has sent a message that nothing waits for"


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_rank_stopped_while_it_starts_is_found(config: EngineConfig, resources: ExitStack, is_joined: bool) -> None:
    rank = Rank(1, *processes.spawn("tests.fakes.rank"))
    assert rank.process is not None
    pid = rank.process.pid
    executor = make_executor(resources, [rank], timeout_s=0.2)
    begin = partial(start_and_load, executor, config)
    if is_joined:
        executor.start(start_of(config), lambda: FakeRank(config, 0, None))
        begin = partial(executor.call, "prepare")
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\): stopped by a signal"):
        begin()


def test_a_rank_that_hangs_while_it_starts_is_found(config: EngineConfig, resources: ExitStack) -> None:
    ours, theirs = socket.socketpair()
    resources.enter_context(theirs)
    rank = Rank(1, ours, subprocess.Popen(["sleep", "60"]))
    executor = make_executor(resources, [rank], timeout_s=0.3)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process .*\): neither .* processor time for 0\.3 s while it"):
        executor.start(start_of(config), lambda: FakeRank(config, 0, None))


def test_a_rank_that_is_missed_when_something_is_sent_is_named_with_how_it_ended(
    config: EngineConfig, resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiprocessExecutor, "_read", lambda executor: None)  # as late as on a busy machine
    rank = Rank(1, *processes.spawn("tests.fakes.rank"))
    assert rank.process is not None
    executor = make_executor(resources, [rank])
    rank.process.kill()
    rank.process.wait()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"^rank 1 was killed \(signal 9\)"):
            start_and_load(executor, config)


def test_an_executor_can_be_shut_down_by_the_thread_that_reads(resources: ExitStack) -> None:
    ranks, ends = connected(resources, 2)
    is_released = threading.Event()
    executor = make_executor(resources, ranks, on_death=lambda _: executor.shutdown(), on_shutdown=is_released.set)
    ends[0].close()
    assert is_released.wait(100)
    executor._reader.join(100)
    assert not executor._reader.is_alive()


def test_whatever_fails_where_messages_are_read_ends_what_waits(
    config: EngineConfig, resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def how_it_ended(rank: Rank) -> str:
        raise ChildProcessError("it was waited for by somebody else")

    monkeypatch.setattr(Rank, "how_it_ended", how_it_ended)
    ranks, (end,) = connected(resources, 1)
    executor = make_executor(resources, ranks, timeout_s=5.0)

    def join_and_end() -> None:
        frames.read(end)
        end.sendall(frames.pack(Value()))
        frames.read(end)
        end.close()

    threading.Thread(target=join_and_end).start()
    executor.start(start_of(config), lambda: FakeRank(config, 0, None))
    with pytest.raises(EngineDeadError, match=r"the connection of rank 1 \(at there\) cannot be read: ChildProcess"):
        executor.call("op_choices")


def test_a_launched_step_is_awaited_with_its_result_and_fails_with_the_reason_of_another_rank(
    config: EngineConfig, resources: ExitStack
) -> None:
    class LaunchedSteps(FakeRank):
        def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
            return LaunchedStep(lambda: result_of(step.step_id), noted)

    def result_of(step_id: int) -> ModelRunnerOutput:
        if step_id == 1:
            return ModelRunnerOutput(step_id=step_id, rows=[])
        end.sendall(frames.pack(CoreFailed(message="CUDA error: out of memory")))
        raise EngineDeadError("a call did not end")

    def noted(error: Exception) -> Exception:
        failures.append(error)
        return error

    failures: list[Exception] = []
    ranks, (end,) = connected(resources, 1)
    executor = make_executor(resources, ranks)
    threading.Thread(target=lambda: (frames.read(end), end.sendall(frames.pack(Value())))).start()
    executor.start(start_of(config), lambda: LaunchedSteps(config, 0, None))
    first, second = executor.submit(numbered(1)), executor.submit(numbered(0))
    assert not first.done()
    assert first.result().step_id == 1
    assert not failures
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"rank 1 \(at there\): CUDA error: out of memory"):
            second.result()
    with pytest.raises(EngineDeadError, match="rank 1"):
        executor.submit(numbered(2))


def test_a_process_that_has_ended_is_not_stopped() -> None:
    connection, process = processes.spawn("tests.fakes.rank")
    connection.close()
    processes.end(process)
    assert not Rank(1, connection, process).is_stopped
