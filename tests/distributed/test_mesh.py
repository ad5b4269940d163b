"""What one rank is told about its share."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import ConfigError


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
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, must divide 10, a size of this model"):
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
