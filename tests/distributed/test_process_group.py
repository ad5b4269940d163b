"""Groups whose calls are launched on a device: what does not end there is aborted after the deadline."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from octavo.distributed.overdue import OverdueWatch
from octavo.distributed.process_group import Members, ProcessGroup
from octavo.errors import EngineDeadError

DEADLINE_S = 0.3


class Stream:
    """What a device computes: an event on it, which has come when the last call has ended."""

    def __init__(self) -> None:
        self.num_launched = self.num_marked = self.num_ended = 0
        self.is_lost = False

    def record(self) -> None:
        self.num_marked = self.num_launched

    def query(self) -> bool:
        if self.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.num_ended >= self.num_marked


class Launching:
    """Stands for ProcessGroupNCCL: calls return before they have ended, and `abort` ends them."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.is_aborted = threading.Event()

    def _allgather_base(self, out: Any, share: Any) -> Launching:
        self.stream.num_launched += 1
        return self

    def wait(self) -> None:
        """Let the stream wait, not the host."""

    def abort(self) -> None:
        self.stream.num_ended = self.stream.num_launched
        self.is_aborted.set()


@pytest.fixture
def stream() -> Stream:
    return Stream()


def group_on(stream: Stream, others_wait: bool = False) -> tuple[ProcessGroup, Launching]:
    backend, store = Launching(stream), HashStore()
    if others_wait:
        store.set("waits 1", "")
    members = Members(range(2), 0, store)
    group = ProcessGroup(backend, members, DEADLINE_S, lambda *rest: OverdueWatch(stream, *rest))
    return group, backend


def test_a_call_that_does_not_end_is_aborted_after_the_deadline_and_names_the_rank(stream: Stream) -> None:
    group, backend = group_on(stream)
    begun = time.monotonic()
    group.gather(torch.ones(3))
    group.check()
    assert backend.is_aborted.wait(100), "what waits on the device is never ended"
    assert time.monotonic() - begun > DEADLINE_S
    for call in (group.check, lambda: group.gather(torch.ones(3))):
        with pytest.raises(EngineDeadError, match=r"rank 1 did not come: a call did not end within 0\.3 s"):
            call()


def test_where_all_ranks_wait_none_is_named(stream: Stream) -> None:
    group, backend = group_on(stream, others_wait=True)
    group.gather(torch.ones(3))
    assert backend.is_aborted.wait(100)
    with pytest.raises(EngineDeadError, match=r"a call of ranks \[0, 1\] did not end .* and all wait"):
        group.check()


def test_a_device_that_fails_is_an_error_of_the_group(stream: Stream) -> None:
    group, backend = group_on(stream)
    stream.is_lost = True
    group.gather(torch.ones(3))
    assert backend.is_aborted.wait(100)
    with pytest.raises(EngineDeadError, match="the device has failed: CUDA error"):
        group.check()


def test_calls_that_end_in_time_are_left_alone_however_many_follow(stream: Stream) -> None:
    group, backend = group_on(stream)
    for _ in range(12):
        group.gather(torch.ones(3))
        stream.num_ended += 1
        time.sleep(DEADLINE_S / 6)
    time.sleep(2 * DEADLINE_S)
    group.check()
    assert not backend.is_aborted.is_set()


def test_calls_that_a_graph_launches_have_the_deadline_when_the_group_is_told(stream: Stream) -> None:
    group, backend = group_on(stream)
    stream.num_launched += 1  # by no call of the group
    group.watch()
    assert backend.is_aborted.wait(100), "what waits on the device is never ended"
    with pytest.raises(EngineDeadError, match="rank 1 did not come"):
        group.check()


def test_poison_ends_what_waits_on_the_device_at_once(stream: Stream) -> None:
    group, backend = group_on(stream)
    group.gather(torch.ones(3))
    group.poison("rank 1 was killed")
    assert backend.is_aborted.is_set()
    with pytest.raises(EngineDeadError, match="rank 1 was killed"):
        group.check()
    group.close()
