"""What one rank is told about its share."""

from __future__ import annotations

import torch

from octavo.distributed.mesh import Mesh


def test_a_single_rank_has_everything() -> None:
    mesh = Mesh.single()
    x = torch.ones(2, 3)
    assert mesh.share(7) == (0, 7)
    assert mesh.sum(x) is x
    assert mesh.gather(x) is x


def test_shares_of_several_ranks_cover_everything_once() -> None:
    shares = [Mesh(rank, 4).share(12) for rank in range(4)]
    assert [index for start, length in shares for index in range(start, start + length)] == list(range(12))
