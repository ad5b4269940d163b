"""Embeddings and the head."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding, LMHead, TiedEmbedding, TiedHead
from tests.layers.bound import apart, fill, finish, random

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
    embedding = fill(TiedEmbedding(10, 4), {"layers.0.part.weight": table})
    head = finish(TiedHead(4, 10, embedding))
    assert torch.equal(embedding(torch.tensor([0, 9, 9])), table[[0, 9, 9]])
    torch.testing.assert_close(head(random(3, 4)), random(3, 4) @ table.T)
    assert head.state() == {}
    (slot,) = head.tensor_slots("lm_head")
    assert not slot.required
    slot.fill(random(10, 4))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        slot.fill(random(10, 4) + 1)


def test_ranks_share_the_vocabulary() -> None:
    stored = {"lm_head.weight": random(10, 4)}
    hidden = random(3, 4)
    shares = [fill(LMHead(4, 10, apart(rank, 2)), stored, "lm_head")(hidden) for rank in (0, 1)]
    torch.testing.assert_close(torch.cat(shares, dim=1), hidden @ random(10, 4).T)
