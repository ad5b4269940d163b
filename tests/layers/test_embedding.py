"""Embeddings and the head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding, LMHead, TiedEmbedding, TiedHead
from tests.distributed.threads import run_ranks
from tests.layers.bound import fill, finish, random

ONE = Mesh.single()


def test_an_embedding_reads_rows_behind_its_offset() -> None:
    table = random(12, 4)
    layer = fill(Embedding(10, 4, offset=2), {"layers.0.part.weight": table})
    assert torch.equal(layer(torch.tensor([0, 9])), table[[2, 11]])


def test_logits_are_float32_whatever_the_weights_are() -> None:
    head = LMHead(4, 10, ONE).to(torch.bfloat16)
    fill(head, {"lm_head.weight": random(10, 4)}, "lm_head")
    logits = head(random(3, 4).to(torch.bfloat16))
    assert (logits.shape, logits.dtype) == ((3, 10), torch.float32)


def test_a_tied_head_shares_the_table_and_needs_none_of_its_own() -> None:
    table = random(10, 4)
    embedding = fill(TiedEmbedding(4, 10, ONE), {"layers.0.part.weight": table})
    head = finish(TiedHead(embedding))
    assert torch.equal(embedding(torch.tensor([0, 9, 9])), table[[0, 9, 9]])
    torch.testing.assert_close(head(random(3, 4)), random(3, 4) @ table.T)
    assert head.state() == {}
    (slot,) = head.tensor_slots("lm_head")
    assert not slot.required
    slot.fill(random(10, 4))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        slot.fill(random(10, 4) + 1)


@pytest.mark.parametrize("size", [2, 3, 4, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_share_the_vocabulary(size: int, dtype: torch.dtype) -> None:
    table, hidden, ids = random(10, 4).to(dtype), random(3, 4).to(dtype), torch.tensor([0, 9, 3, 4, 7, 7])

    def share(mesh: Mesh) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        stored = {"part.weight": table}
        tied = fill(TiedEmbedding(4, 10, mesh).to(dtype), stored, "part")
        plain, head = (fill(each.to(dtype), stored, "part") for each in (Embedding(10, 4, mesh), LMHead(4, 10, mesh)))
        tied_head = finish(TiedHead(tied))
        (slot,) = tied_head.tensor_slots("lm_head")
        slot.fill(table)  # which repeats this rank's rows, too
        return tied(ids), plain(ids), mesh.gather(head(hidden)), mesh.gather(tied_head(hidden))

    for rows, plain_rows, logits, tied_logits in run_ranks(size, share):
        assert torch.equal(rows, table[ids])
        assert torch.equal(plain_rows, table[ids])
        torch.testing.assert_close(logits[:, :10], (hidden @ table.T).float())
        assert torch.equal(tied_logits, logits)


def test_a_rank_keeps_its_share_of_a_table_alone() -> None:
    sizes = run_ranks(4, lambda mesh: sum(each.numel() for each in TiedEmbedding(4, 10, mesh).parameters()))
    assert sizes == [3 * 4] * 4


def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank() -> None:
    def found(mesh: Mesh) -> None:
        layer = fill(Embedding(10, 4, mesh), {"part.weight": random(10, 4)}, "part")
        with pytest.raises(IndexError, match="out of range"):
            layer(torch.tensor([10]))

    run_ranks(2, found)
