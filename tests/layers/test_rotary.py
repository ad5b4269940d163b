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
from octavo.layers.rotary import LearnedRotary, PositionScale, Rotary
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


def test_learned_numbers_of_zero_leave_frequencies_as_they_are() -> None:
    rope, q = Rope(16, 10_000.0), random(2, 1, 16)
    learned = fill(LearnedRotary(rope), {"rotary_emb.alpha": torch.zeros(8)})
    batch = make_batch(3, 400)
    assert torch.equal(learned(q, q, batch)[0], fill(Rotary(rope), {})(q, q, batch)[0])


def test_each_frequency_is_multiplied_with_the_exponential_of_its_number() -> None:
    numbers = torch.linspace(-1.0, 1.0, 8)
    learned = fill(LearnedRotary(Rope(16, 10_000.0)), {"rotary_emb.alpha": numbers})
    q = torch.zeros(1, 1, 16)
    q[..., :8] = 1.0  # becomes cosines and sines of the angles
    angles = 7 * Rope(16, 10_000.0).inverse_frequencies() * numbers.exp()
    expected = torch.cat((angles.cos(), angles.sin()))
    torch.testing.assert_close(learned(q, q, make_batch(7))[0][0, 0], expected, atol=1e-6, rtol=0)


def test_a_layer_that_is_filled_again_writes_over_the_table_that_recorded_steps_read() -> None:
    layer, other = (
        fill(LearnedRotary(Rope(16, 500.0)), {"rotary_emb.alpha": torch.full((8,), each)}) for each in (0.5, 0.25)
    )
    q, batch, place = random(1, 1, 16), make_batch(9), layer._table.data_ptr()
    assert not torch.equal(layer(q, q, batch)[0], other(q, q, batch)[0])
    layer.restore(other.state())
    assert torch.equal(layer(q, q, batch)[0], other(q, q, batch)[0])
    assert layer._table.data_ptr() == place


def test_queries_grow_with_the_logarithm_of_their_position_head_by_head() -> None:
    stored = {"growth.scale": torch.tensor([9.0, 2.0, 0.5]), "growth.bias": torch.tensor([9.0, 1.0, -1.0])}
    layer = fill(PositionScale(3, slice(1, 3)), stored, path="growth")
    q = random(2, 2, 4)
    (found,) = layer((q,), make_batch(0, 19))
    logarithm = float(torch.tensor(20.0).log())
    expected = torch.tensor([[1.0, -1.0], [2.0 * logarithm + 1.0, 0.5 * logarithm - 1.0]])
    torch.testing.assert_close(found, q * expected[:, :, None])
