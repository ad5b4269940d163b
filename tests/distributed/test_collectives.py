"""Every implementation of `Collectives` by one suite: threads, shared memory and TCP between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from octavo.distributed.gloo import GlooGroup
from octavo.distributed.groups import open_groups
from octavo.distributed.mesh import Mesh
from octavo.errors import EngineDeadError
from octavo.platform import Platform
from tests.distributed import works
from tests.distributed.processes import RankProcesses, Work, rendezvous_of
from tests.distributed.threads import DEADLINE_S, memory_meshes, run_on, thread_meshes

KINDS = ["threads", "shared memory", "gloo", "process group", "process group over TCP"]
if Platform.detect().native_module is None:
    KINDS.remove("shared memory")


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    ranks = RankProcesses(4)
    yield ranks
    ranks.close()


def results(
    kind: str, ranks: RankProcesses, work: Work, *, tensor: int = 1, pipeline: int = 1, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """What each rank returned or raised."""
    if kind != "threads":
        return ranks.run(work, tensor=tensor, pipeline=pipeline, kind=kind, deadline_s=deadline_s)

    def caught(mesh: Mesh) -> Any:
        try:
            return work(mesh)
        except Exception as error:
            return error

    return run_on(thread_meshes(tensor, pipeline, deadline_s), caught)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_get_what_one_would_compute(kind: str, size: int, processes: RankProcesses) -> None:
    assert results(kind, processes, works.computes, tensor=size) == [None] * size


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_receive_what_was_sent_in_order(kind: str, stages: int, processes: RankProcesses) -> None:
    assert results(kind, processes, works.sends, pipeline=stages) == [None] * stages


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_sum_do_not_depend_on_the_place_of_a_row(kind: str, processes: RankProcesses) -> None:
    assert results(kind, processes, works.rows_at_other_places, tensor=4) == [None] * 4


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(kind: str, processes: RankProcesses) -> None:
    first, _, third = results(kind, processes, works.misses_rank_1, tensor=3, deadline_s=1.5)
    for error in (first, third):
        assert isinstance(error, EngineDeadError)
        assert "rank 1 " in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_poison_from_another_thread_ends_waiting_with_its_reason(kind: str, processes: RankProcesses) -> None:
    first, _ = results(kind, processes, works.poisoned, tensor=2)
    assert isinstance(first, EngineDeadError)
    assert "a rank is gone" in str(first)


@pytest.mark.parametrize("kind", [each for each in KINDS[1:] if each != "process group over TCP"])
def test_a_killed_rank_ends_the_calls_of_the_others_and_nothing_is_left(kind: str) -> None:
    ranks = RankProcesses(3)
    first, second, third = results(kind, ranks, works.kills_rank_1, tensor=3)
    assert isinstance(second, ProcessLookupError)
    for error in (first, third):
        assert isinstance(error, EngineDeadError)
        assert "rank 1 " in str(error) or "a rank of [0, 1, 2] cannot be reached" in str(error)
    ranks.close()
    assert not any(process.is_alive() for process in ranks.processes)


@pytest.mark.skipif("shared memory" not in KINDS, reason="the compiled library is absent")
def test_ranks_that_make_different_calls_raise(processes: RankProcesses) -> None:
    errors = results("shared memory", processes, works.differs, tensor=2)
    assert all(isinstance(error, EngineDeadError) and "different collective calls" in str(error) for error in errors)


def test_calls_of_a_group_over_tcp_that_is_closed_say_so() -> None:
    group = GlooGroup(0, range(2), (None, None), (None, None), DEADLINE_S)
    group.close()
    for call in (group.gather, group.broadcast, partial(group.send, target=1), partial(group.receive, source=1)):
        with pytest.raises(EngineDeadError, match="closed"):
            call(torch.zeros(1))


@pytest.mark.skipif("shared memory" not in KINDS, reason="the compiled library is absent")
def test_closed_groups_leave_neither_descriptors_nor_memory() -> None:
    descriptors, mapped = len(os.listdir("/proc/self/fd")), _num_mapped()
    meshes = memory_meshes(2, 2)
    assert run_on(meshes, works.gathers) == [None] * 4
    for mesh in meshes:
        mesh.close()
    with pytest.raises(EngineDeadError, match="closed"):
        works.gathers(meshes[0])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert _num_mapped() <= mapped  # other tests of this process may not have ended with theirs


def _num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:octavo-test")


@pytest.mark.skipif("shared memory" not in KINDS, reason="the compiled library is absent")
def test_groups_use_memory_where_all_their_ranks_have_it_and_tcp_between_machines() -> None:
    """Two stages of two ranks, each stage on a machine of its own."""
    with rendezvous_of("shared memory", 20) as one, rendezvous_of("shared memory", 20) as two:
        with rendezvous_of("gloo", 20) as meeting:
            port = meeting.port

        def work(place: Mesh) -> tuple[str, str]:
            machine = (one, two)[place.pipeline.rank]
            rendezvous = structs.replace(machine, shared_ranks=(place.rank - place.tensor.rank, 2), port=port)
            mesh = open_groups(place, rendezvous)
            works.gathers(mesh)
            works.sends(mesh)
            names = type(mesh.tensor_group).__name__, type(mesh.stage_group).__name__
            mesh.close()
            return names

        places = [Mesh.of_rank(rank, tensor=2, pipeline=2) for rank in range(4)]
        assert run_on(places, work) == [("SharedMemoryGroup", "GlooGroup")] * 4
