"""Frequencies of rotary embeddings and how they are stretched."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.layers.rope import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from octavo.ops.registry import bind


def test_frequencies_fall_geometrically() -> None:
    torch.testing.assert_close(Rope(8, 16.0).inverse_frequencies(), torch.tensor([1.0, 0.5, 0.25, 0.125]))


def test_linear_scaling_slows_every_frequency() -> None:
    plain, slow = Rope(8, 100.0), Rope(8, 100.0, LinearScaling(4.0))
    torch.testing.assert_close(slow.inverse_frequencies() * 4, plain.inverse_frequencies())


def test_llama3_scaling_slows_the_slow_keeps_the_fast_and_blends_between() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    plain = Rope(64, 10_000.0).inverse_frequencies()
    ratio = Rope(64, 10_000.0, scaling).inverse_frequencies() / plain
    turns = 64 * plain / (2 * torch.pi)
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1 / 8) & (between < 1)).all()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_what_turns_often_and_slows_what_turns_less_than_once(truncate: bool) -> None:
    """Equations 16 to 22 of the paper: a ramp over the dimensions between the two numbers of turns."""
    scaling = YarnScaling(4.0, 512, YarnScaling.default_attention_factor(4.0), truncate=truncate)
    plain, bent = (Rope(64, 10_000.0, each).inverse_frequencies() for each in (None, scaling))
    turns = 512 * plain / (2 * torch.pi)
    ratio = bent / plain
    # a truncated ramp begins a dimension earlier and ends one later at most
    often, seldom = (turns > 32 * 1.34, turns < 1 / 1.34) if truncate else (turns >= 32, turns <= 1)
    torch.testing.assert_close(ratio[often], torch.ones_like(ratio[often]))
    torch.testing.assert_close(ratio[seldom], torch.full_like(ratio[seldom], 1 / 4))
    assert often.any()
    assert seldom.any()
    steps = ratio[~(often | seldom)].diff()[1:-1]
    torch.testing.assert_close(steps, steps[:1].expand_as(steps), atol=1e-5, rtol=1e-4)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert torch.equal(
        Rope(64, 10_000.0, scaling).table(bind(), 3)[0, :32],
        torch.full((32,), scaling.attention_factor),
    )


def test_a_yarn_ramp_without_extent_is_a_step() -> None:
    scaling = YarnScaling(2.0, 512, 1.0, beta_fast=8.0, beta_slow=8.0, truncate=False)
    ratio = Rope(16, 10_000.0, scaling).inverse_frequencies() / Rope(16, 10_000.0).inverse_frequencies()
    assert set(ratio.tolist()) == {1.0, 0.5}


def test_a_yarn_ramp_whose_ends_are_exchanged_goes_the_other_way() -> None:
    scaling = YarnScaling(2.0, 512, 1.0, beta_fast=1.0, beta_slow=32.0)
    ratio = Rope(16, 10_000.0, scaling).inverse_frequencies() / Rope(16, 10_000.0).inverse_frequencies()
    assert (ratio[0], ratio[-1]) == (0.5, 1.0)


def test_the_longest_sequence_that_is_served_chooses_the_factors_of_longrope() -> None:
    rope = Rope(8, 10_000.0, LongScaling((1.0, 1.0, 2.0, 2.0), (4.0, 4.0, 4.0, 8.0), 64, 1.1))
    plain = Rope(8, 10_000.0).inverse_frequencies()
    torch.testing.assert_close(plain / rope.inverse_frequencies(64), torch.tensor([1.0, 1.0, 2.0, 2.0]))
    torch.testing.assert_close(plain / rope.inverse_frequencies(65), torch.tensor([4.0, 4.0, 4.0, 8.0]))
    assert isinstance(rope.scaling, LongScaling)
    assert rope.scaling.note(64) == "LongRoPE with its short factors: max_model_len is at most 64"
    assert rope.scaling.note(65) == "LongRoPE with its long factors: max_model_len is above 64"
    # a step may have more positions than any sequence that is served
    assert torch.equal(rope.table(bind(), 100, 64)[:10], rope.table(bind(), 10, 64))
    assert torch.equal(rope.table(bind(), 10, 64)[0, :4], torch.full((4,), 1.1))
