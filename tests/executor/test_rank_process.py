"""A rank's process: how far it computes ahead of what it knows."""

from __future__ import annotations

import dataclasses
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from octavo.config.schema import EngineConfig
from octavo.core.messages import Shutdown
from octavo.core.process import frames
from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.executor.channel import Start, Step
from octavo.executor.rank_process import serve_rank
from octavo.worker.start.identity import Identity
from tests.executor.test_conformance import numbered
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank import FakeRank, failed
from tests.worker.engine_config import make_config


class Launched(Future[ModelRunnerOutput]):
    """A step on a device: its `result` waits for it, which is told to `events`."""

    def __init__(self, step_id: int, events: SimpleQueue[str]) -> None:
        super().__init__()
        self._step_id, self._events = step_id, events

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._events.put(f"waits for {self._step_id}")
        return ModelRunnerOutput(step_id=self._step_id, rows=[])


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, ["launches 1", "waits for 1", "launches 2", "waits for 2", "launches 3", "waits for 3"]),
        (3, ["launches 1", "launches 2", "launches 3", "waits for 1"]),
    ],
)
def test_a_rank_has_as_many_steps_in_flight_as_rank_0_and_knows_the_results_of_earlier_ones(
    tmp_path: Path, depth: int, expected: list[str]
) -> None:
    events: SimpleQueue[str] = SimpleQueue()

    class LaunchingRank(FakeRank):
        def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
            events.put(f"launches {step.step_id}")
            return Launched(step.step_id, events)

    served(tmp_path, LaunchingRank, depth, 3)
    assert [events.get_nowait() for _ in range(events.qsize())] == expected


def test_a_launch_that_fails_behind_others_is_reported_before_another_step_comes(tmp_path: Path) -> None:
    """The other ranks wait for what it has not launched."""
    events: SimpleQueue[str] = SimpleQueue()

    class FailingRank(FakeRank):
        def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
            if step.step_id == 1:
                return Launched(step.step_id, events)
            return failed(RuntimeError("the kernel is too large"))

        def poison(self, reason: str) -> None:
            events.put(reason)

    with pytest.raises(RuntimeError, match="the kernel is too large"):
        served(tmp_path, FailingRank, 3, 2, is_ended=False)
    assert [events.get_nowait() for _ in range(events.qsize())] == [
        "waits for 1",
        "rank 1 failed: RuntimeError: the kernel is too large",
    ]


def served(tmp_path: Path, rank_class: type[FakeRank], depth: int, num_steps: int, *, is_ended: bool = True) -> None:
    """Serve an executor that has so many steps in flight, and sends Shutdown behind them where `is_ended`."""

    def open_worker(config: EngineConfig, rank: int, rendezvous: Rendezvous | None, *rest: Any) -> FakeRank:
        return rank_class(config, rank, rendezvous)

    config = make_config(make_checkpoint("llama", tmp_path / "model"), num_gpu_blocks_override=64)
    ahead = dataclasses.replace(config.scheduler, max_steps_in_flight=depth)
    config = msgspec.structs.replace(config, scheduler=ahead)
    start = Start(
        identity=Identity.of(config), config=msgspec.Raw(frames.encode(config)), rendezvous=Rendezvous(), rank=1
    )
    messages = [start, *(Step(numbered(step_id)) for step_id in range(1, num_steps + 1))]
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        rank = thread.submit(serve_rank, theirs, open_worker)
        for message in [*messages, Shutdown()] if is_ended else messages:
            ours.sendall(frames.pack(message))
        try:
            rank.result(60)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
