"""Frequencies and their scaling; one table per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Llama3Scaling, Rope, Rotary
from tests.layers.bound import fill, random


@dataclass(frozen=True)
class Batch:
    token_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata
    kv_caches: tuple[()] = ()


def make_batch(*positions: int) -> Batch:
    metadata = AttentionMetadata.build([len(positions)], [len(positions)], [[1]], 16)
    return Batch(torch.zeros(len(positions), dtype=torch.int64), torch.tensor(positions), metadata)


def test_frequencies_fall_geometrically() -> None:
    torch.testing.assert_close(Rope(8, 16.0).inverse_frequencies(), torch.tensor([1.0, 0.5, 0.25, 0.125]))


def test_linear_scaling_slows_every_frequency() -> None:
    plain, slow = Rope(8, 100.0), Rope(8, 100.0, linear_factor=4.0)
    torch.testing.assert_close(slow.inverse_frequencies() * 4, plain.inverse_frequencies())


def test_llama3_scaling_slows_the_slow_keeps_the_fast_and_blends_between() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    plain = Rope(64, 10_000.0).inverse_frequencies()
    ratio = Rope(64, 10_000.0, llama3=scaling).inverse_frequencies() / plain
    turns = 64 * plain / (2 * torch.pi)
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1 / 8) & (between < 1)).all()


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = fill(Rotary(Rope(16, 10_000.0)), {})
    q, k = random(1, 1, 16), random(1, 1, 16) + 0.5

    def score(query_position: int, key_position: int) -> Tensor:
        rotated_q, _ = rotary(q, k, make_batch(query_position))
        _, rotated_k = rotary(q, k, make_batch(key_position))
        return (rotated_q * rotated_k).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), atol=1e-4, rtol=1e-4)
    assert not torch.isclose(score(9, 4), score(9, 5), atol=1e-2)


def test_layers_of_a_step_share_one_table() -> None:
    batch = make_batch(0, 1, 2)
    for _ in range(3):
        fill(Rotary(Rope(16, 10_000.0)), {})(random(3, 2, 16), random(3, 1, 16), batch)
    assert len(batch.attention.derived) == 1


def test_norms_come_before_the_turn() -> None:
    rotary = fill(Rotary(Rope(16, 10_000.0)), {})
    norms: Any = tuple(fill(RMSNorm(16, 1e-6), {"layers.0.part.weight": random(16) + each}) for each in (0, 1))
    q, k, batch = random(3, 2, 16), random(3, 1, 16), make_batch(3, 4, 5)
    found = rotary(q, k, batch, norms=norms)
    expected = rotary(norms[0](q), norms[1](k), batch)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
