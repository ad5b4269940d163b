"""What one rank is told about its share."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import ConfigError, EngineDeadError
from tests.distributed.threads import run_ranks


def test_a_single_rank_has_everything() -> None:
    mesh = Mesh.single()
    x = torch.ones(2, 3)
    assert mesh.share(7) == (0, 7)
    assert mesh.sum(x) is x
    assert mesh.gather(x) is x


def test_shares_of_several_ranks_cover_everything_once() -> None:
    shares = [Mesh(Axis(rank, 4)).share(12) for rank in range(4)]
    assert [index for start, length in shares for index in range(start, start + length)] == list(range(12))


def test_things_that_cannot_be_shared_evenly_are_refused_by_their_number() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size is 4, must divide the 10 outputs of a layer of this model"
    ):
        Mesh(Axis(0, 4)).share(10)


def test_ranks_of_one_stage_are_neighbours_and_stages_cover_all_layers_once() -> None:
    ranks = [Mesh.of_rank(rank, tensor=2, pipeline=3) for rank in range(6)]
    assert [(mesh.pipeline.rank, mesh.tensor.rank) for mesh in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert {mesh.size for mesh in ranks} == {6}
    assert [index for mesh in ranks[::2] for index in mesh.layer_range(8)] == list(range(8))
    assert len({mesh.description for mesh in ranks}) == 6


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, must be at most 3, the layers of this model"):
        Mesh.of_rank(0, pipeline=4).layer_range(3)


def test_layers_reach_the_ranks_of_their_stage_and_stages_their_counterparts() -> None:
    def work(mesh: Mesh) -> tuple[list[float], list[float]]:
        mine = torch.tensor([float(10 * mesh.pipeline.rank + mesh.tensor.rank)])
        gathered, received = mesh.gather(mine), torch.zeros(1)
        if mesh.pipeline.rank == 0:
            mesh.send(mine, 1)
        else:
            mesh.receive(received, 0)
        assert mesh.sum(mine).item() == gathered.sum().item()
        mesh.broadcast(mine, 1)
        assert mine.item() == gathered[1].item()
        return gathered.tolist(), received.tolist()

    assert run_ranks(2, work, pipeline=2) == [
        ([0.0, 1.0], [0.0]),
        ([0.0, 1.0], [0.0]),
        ([10.0, 11.0], [0.0]),
        ([10.0, 11.0], [1.0]),
    ]


def test_a_dry_run_reaches_no_other_rank_and_gets_shapes() -> None:
    def work(mesh: Mesh) -> None:
        if mesh.tensor.rank == 1:
            return
        share = torch.empty(3, 2, device="meta")
        assert mesh.gather(share).shape == (3, 4)
        assert mesh.sum(share).shape == (3, 2)
        mesh.broadcast(share)
        mesh.receive(share, 0)

    run_ranks(2, work)


def test_ranks_beside_one_that_fails_raise_and_the_cause_is_reported() -> None:
    def work(mesh: Mesh) -> None:
        if mesh.tensor.rank == 1:
            raise ValueError("no such weight")
        with pytest.raises(EngineDeadError, match="no such weight"):
            mesh.gather(torch.ones(1))

    with pytest.raises(ValueError, match="no such weight"):
        run_ranks(2, work)
