"""Rotated queries and keys; one table for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.devices.reference.attention import ReferenceBackend
from octavo.layers.layer import Binding
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.layers.rotary import Rotary
from octavo.ops.registry import bind
from tests.layers.bound import fill, random


def make_batch(*positions: int) -> ModelInput:
    metadata = AttentionMetadata.build([len(positions)], [len(positions)], [[1]], 16)
    return ModelInput(torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions), [metadata], ())


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = fill(Rotary(Rope(16, 10_000.0)), {})
    q, k = random(1, 1, 16), random(1, 1, 16) + 0.5

    def score(query_position: int, key_position: int) -> Tensor:
        rotated_q, _ = rotary(q, k, make_batch(query_position))
        _, rotated_k = rotary(q, k, make_batch(key_position))
        return (rotated_q * rotated_k).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)
    assert not torch.isclose(score(9, 4), score(9, 5), atol=1e-2)


def test_layers_with_the_same_frequencies_share_one_table() -> None:
    binding = Binding(bind(), ReferenceBackend(), max_positions=10)
    layers = [Rotary(Rope(16, 10_000.0)), Rotary(Rope(16, 10_000.0)), Rotary(Rope(16, 500.0))]
    for layer in layers:
        layer.bind(binding)
    assert layers[0]._table is layers[1]._table
    assert not torch.equal(layers[0]._table, layers[2]._table)
    assert layers[0]._table.shape == (10, 16)
    assert layers[0]._table.nbytes == layers[0].rope.table_bytes(10)


def test_norms_come_before_the_turn() -> None:
    rotary = fill(Rotary(Rope(16, 10_000.0)), {})
    norms: Any = tuple(fill(RMSNorm(16, 1e-6), {"layers.0.part.weight": random(16) + each}) for each in (0, 1))
    q, k, batch = random(3, 2, 16), random(3, 1, 16), make_batch(3, 4, 5)
    found = rotary(q, k, batch, norms=norms)
    expected = rotary(norms[0](q), norms[1](k), batch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
