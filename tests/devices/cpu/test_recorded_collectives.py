"""Recorded decode steps of several ranks: what ranks compute together is repeated with the rest, or nothing is."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.devices.cpu.recorded_model import RecordedModel
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.device import LanguageModel
from octavo.distributed.collectives import Collectives
from octavo.distributed.groups import open_groups
from octavo.distributed.mesh import Mesh
from octavo.errors import EngineDeadError
from octavo.ops.registry import Ops
from tests.conformance.runtimes import LEVELS
from tests.devices.cpu.test_recorded_model import Steps
from tests.distributed.processes import rendezvous_of
from tests.distributed.threads import memory_meshes, run_on, run_ranks

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

NUM_STEPS = 12


class SharedModel:
    """Each rank norms its half of what lies in the batch, then all norm the gathered rows and add them up."""

    def __init__(self, ops: Ops, mesh: Mesh) -> None:
        self.ops, self.mesh = ops, mesh
        self.weight = torch.rand(8, generator=torch.Generator().manual_seed(1)).bfloat16()
        self.num_runs = 0

    def __call__(self, batch: ModelInput) -> Tensor:
        self.num_runs += 1
        rank = self.mesh.tensor.rank
        mine = (batch.token_ids, batch.positions)[rank].view(torch.bfloat16).view(-1, 4)
        for _ in range(3):
            normed = self.ops.rms_norm(self.mesh.gather(mine), self.weight, 1e-6)
            self.mesh.broadcast(normed, 1)
            mine = self.mesh.sum(normed)[:, 4 * rank : 4 * rank + 4]
        return self.ops.rms_norm(mine, self.weight[:4], 1e-6)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


def run_steps(model: LanguageModel) -> list[Tensor]:
    steps = Steps()
    batches = (steps.batch((0, 5 + number, 1), (1, 6 + 2 * number, 1)) for number in range(NUM_STEPS))
    return [model(batch).clone() for batch in batches]


def shared_meshes(runtimes: list[CpuRuntime]) -> list[Mesh]:
    return memory_meshes(len(runtimes), allocate=[runtime.empty for runtime in runtimes])


def test_recorded_steps_of_two_ranks_have_the_bits_of_steps_that_python_runs() -> None:
    expected = run_ranks(2, lambda mesh: run_steps(SharedModel(CpuRuntime.open().bind(), mesh)))
    runtimes = [CpuRuntime.open() for _ in range(2)]

    def work(mesh: Mesh) -> tuple[list[Tensor], int]:
        runtime = runtimes[mesh.rank]
        model = SharedModel(runtime.bind(), mesh)
        return run_steps(RecordedModel(model, runtime)), model.num_runs

    for (found, num_runs), wanted in zip(run_on(shared_meshes(runtimes), work), expected, strict=True):
        assert num_runs == 2
        assert [torch.equal(*each) for each in zip(found, wanted, strict=True)] == [True] * NUM_STEPS


def test_a_recording_that_leaves_out_a_collective_call_would_be_noticed() -> None:
    """The steps above depend on what the other rank has: without it they have other bits."""
    runtimes = [CpuRuntime.open() for _ in range(2)]

    class Deaf:
        """Says that its calls are recorded, and makes them where no recording sees them."""

        is_recordable = True

        def __init__(self, group: Collectives) -> None:
            self.rank, self.size, self.broadcast, self.sum = group.rank, group.size, group.broadcast, group.sum

        def gather(self, share: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                return torch.cat([share] * self.size, -1)

    def work(mesh: Mesh) -> list[Tensor]:
        runtime = runtimes[mesh.rank]
        deaf = replace(mesh, tensor_group=Deaf(mesh.tensor_group))  # type: ignore[arg-type]
        return run_steps(RecordedModel(SharedModel(runtime.bind(), deaf), runtime))

    expected = run_ranks(2, lambda mesh: run_steps(SharedModel(CpuRuntime.open().bind(), mesh)))
    found = run_on(shared_meshes(runtimes), work)
    assert not any(torch.equal(found[0][number], expected[0][number]) for number in range(2, NUM_STEPS))


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_collectives_that_none_keeps_switch_recording_off_by_name(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def work(mesh: Mesh) -> tuple[list[Tensor], int]:
        if kind == "gloo":
            mesh = open_groups(Mesh.of_rank(mesh.rank, tensor=2), rendezvous)
        runtime = CpuRuntime.open()
        model = SharedModel(runtime.bind(), mesh)
        results = run_steps(RecordedModel(model, runtime))
        mesh.close()
        return results, model.num_runs

    expected = run_ranks(2, lambda mesh: run_steps(SharedModel(CpuRuntime.open().bind(), mesh)))
    with caplog.at_level(logging.INFO), rendezvous_of("gloo", 20) as rendezvous:
        for (found, num_runs), wanted in zip(run_ranks(2, work), expected, strict=True):
            assert num_runs == NUM_STEPS
            assert [torch.equal(*each) for each in zip(found, wanted, strict=True)] == [True] * NUM_STEPS
    name = {"threads": "ThreadCollectives.gather", "gloo": "GlooGroup.gather"}[kind]
    assert caplog.messages == [f"steps are not recorded: {name} is no compiled kernel"] * 2


def test_a_recorded_step_raises_what_poisons_the_group() -> None:
    runtimes = [CpuRuntime.open() for _ in range(2)]

    def work(mesh: Mesh) -> None:
        steps, runtime = Steps(), runtimes[mesh.rank]
        recorded = RecordedModel(SharedModel(runtime.bind(), mesh), runtime)
        for number in range(3):
            recorded(steps.batch((0, number, 1)))
        if mesh.rank == 1:
            mesh.poison("rank 1 was stopped")
        with pytest.raises(EngineDeadError, match="rank 1 was stopped"):
            recorded(steps.batch((0, 9, 1)))

    run_on(shared_meshes(runtimes), work)
