"""Sampling: the reference's tokens, and bits that depend on the row alone, over levels, vocabularies, ties, threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.devices.cpu.sampler import NativeSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.metadata import RowSamples, SamplingRow
from tests.conformance.runtimes import LEVELS, levels_of, runtime
from tests.sampling.sequences import sampling_row

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

UNITS = levels_of("sampling")

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"seed": 1},
    {"seed": 2, "temperature": 0.6, "logprobs": 20},
    {"seed": 3, "temperature": 1e-4},
    {"seed": 4, "temperature": 100.0},
    {"seed": 5, "top_p": 0.9, "logprobs": 0},
    {"seed": 6, "top_p": 1e-9},
    {"seed": 7, "top_p": 1 - 1e-12},
    {"seed": 8, "top_k": 1},
    {"seed": 9, "top_k": 7, "num_samples": 3, "logprobs": 1},
    {"seed": 10, "top_k": 10_000},
    {"seed": 11, "min_p": 0.05},
    {"seed": 12, "min_p": 1.0},
    {"seed": 13, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
    {"seed": 14, "top_k": 300, "top_p": 0.99, "num_samples": 5},
    {"seed": 15, "top_p": 0.5, "repetition_penalty": 1.8, "frequency_penalty": 0.3, "presence_penalty": -0.4},
    {"temperature": 0.0, "repetition_penalty": 0.5, "logprobs": 2},
    {"seed": 16, "logit_bias": {0: 4.0, 2: -100.0}, "logprobs": 2},
    {"seed": 17, "allowed_token_ids": [4, 0, 2, 2], "top_k": 2, "logprobs": 5},
    {"temperature": 0.0, "allowed_token_ids": [3, 1], "presence_penalty": 1.0},
]


@cache
def native(level: str, threads: int = 1) -> NativeSampler:
    return NativeSampler(runtime(level, threads).cpu)


def rows_of(kinds: Sequence[dict[str, Any]]) -> list[SamplingRow]:
    return [sampling_row(**kind) for kind in kinds]


def token_ids(result: RowSamples) -> list[int]:
    assert result.error is None
    return [token.token_id for token in result.tokens]


def make_logits(kind: str, rows: int, vocab_size: int) -> Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    if kind == "ties":
        return (logits / 3).round()
    if kind == "equal":
        return torch.full((rows, vocab_size), -2.5)
    if kind == "barred":
        logits[:, 3::2] = -math.inf
    if kind == "large":
        logits *= 1e30
    return logits


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "barred", "large"])
@pytest.mark.parametrize("vocab_size", [5, 63, 64, 65, 1000, 33_001])
@pytest.mark.parametrize("level", UNITS)
def test_tokens_are_those_of_the_reference(level: str, vocab_size: int, kind: str) -> None:
    logits = make_logits(kind, len(KINDS), vocab_size)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(KINDS))
    found = native(level).sample(logits.clone(), rows_of(KINDS))
    exact = torch.log_softmax(logits.double(), -1)
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert token_ids(one) == token_ids(other)
        for mine, theirs in zip(one.tokens, other.tokens, strict=True):
            check_described(mine, theirs, exact[row], logits[row])


def check_described(found: TokenLogprobs, expected: TokenLogprobs, exact: Tensor, logits: Tensor) -> None:
    """`exact` are the log-probabilities in float64."""
    if expected.logprob is None:
        assert found == expected
        return
    assert found.logprob == pytest.approx(exact[found.token_id].item(), rel=1e-6, abs=2e-6)
    assert found.rank == int((logits > logits[found.token_id]).sum()) + 1
    likeliest = logits.argsort(descending=True, stable=True)[: len(expected.top_ids)]
    assert list(found.top_ids) == likeliest.tolist()
    assert found.top_logprobs == pytest.approx(exact[likeliest].tolist(), rel=1e-6, abs=2e-6)


@pytest.mark.parametrize("vocab_size", [257, 40_003])
@pytest.mark.parametrize("level", UNITS)
def test_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(level: str, vocab_size: int) -> None:
    logits = make_logits("normal", len(KINDS), vocab_size)
    together = native(level).sample(logits.clone(), rows_of(KINDS))
    for threads in (2, 5):
        assert native(level, threads).sample(logits.clone(), rows_of(KINDS)) == together
        for row, kind in enumerate(KINDS):
            # alone, its vocabulary is shared by the threads
            assert native(level, threads).sample(logits[row : row + 1].clone(), rows_of([kind])) == [together[row]]
    order = [7, 3, 15, 0, 9, 9, 19]
    assert native(level, 2).sample(logits[order], rows_of([KINDS[i] for i in order])) == [together[i] for i in order]


@settings(max_examples=60)
@given(
    level=st.sampled_from(UNITS),
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([1, 7, 130, 20_011]),
    spread=st.sampled_from([0.0, 0.5, 6.0]),
    coarse=st.booleans(),
    top_k=st.sampled_from([0, 1, 5, 127, 128, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.2]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
def test_filters_keep_what_the_reference_keeps(
    level: str, seed: int, vocab_size: int, spread: float, coarse: bool, **params: Any
) -> None:
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    logits = logits.bfloat16().float() if coarse else logits
    # many draws visit most of what is kept
    row = sampling_row(seed=seed, num_samples=16, **params)
    (expected,) = ReferenceSampler().sample(logits.clone(), [row])
    (found,) = native(level).sample(logits.clone(), [row])
    assert token_ids(found) == token_ids(expected)


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("params", [{"temperature": 1.5}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(level: str, params: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, -30.0]])
    scaled = logits[0].double() / params.get("temperature", 1.0)
    count = 4000
    (result,) = native(level).sample(logits.clone(), [sampling_row(seed=5, num_samples=count, **params)])
    observed = torch.bincount(torch.tensor(token_ids(result)), minlength=5)
    kept = {"top_p": 3, "top_k": 3, "min_p": 3}.get(next(iter(params)), 4)
    likeliest = scaled.topk(kept).indices
    expected = torch.softmax(scaled[likeliest], -1) * count
    assert observed[likeliest].sum() == count
    assert ((observed[likeliest] - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, 0.999


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70, 20_000, 20_002])
def test_a_row_without_numbers_gets_an_error_and_the_others_go_on(level: str, bad: float, place: int) -> None:
    logits = make_logits("normal", 3, 20_003)
    kinds: list[dict[str, Any]] = [{"seed": 1, "top_p": 0.9}, {"temperature": 0.0, "logprobs": 2}, {"seed": 3}]
    sound = native(level).sample(logits.clone(), rows_of(kinds))
    if bad == -math.inf:
        logits[1] = bad  # a single one is a token that cannot come
    logits[1, place] = bad
    found = native(level, 2).sample(logits, rows_of(kinds))
    assert (found[0], found[2], found[1].tokens) == (sound[0], sound[2], [])
    assert found[1].error is not None
    assert "position 3 hold NaN or infinity" in found[1].error.message


@pytest.mark.parametrize("level", UNITS)
def test_given_tokens_are_described_as_drawn_ones_are(level: str) -> None:
    logits = make_logits("normal", 4, 20_003)
    rows = rows_of([{"seed": seed, "logprobs": 6} for seed in range(4)])
    drawn = [result.tokens[0] for result in native(level).sample(logits.clone(), rows)]
    for threads in (1, 2):
        described = native(level, threads).describe(logits, [token.token_id for token in drawn], 6)
        assert described == drawn
    for row, token in enumerate(drawn):
        assert native(level, 2).describe(logits[row : row + 1], [token.token_id], 6) == [token]


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("vocab_size", [4, 5000])
@pytest.mark.parametrize("others", [{}, {"top_k": 4}, {"min_p": 0.2}])
@pytest.mark.parametrize(
    ("top_p", "num_kept"),
    [(0.25, 1), (0.5, 1), (math.nextafter(0.5, 1), 2), (0.75, 2), (math.nextafter(0.75, 1), 4), (0.875, 4)],
)
def test_top_p_ends_with_the_token_that_reaches_it(
    level: str, vocab_size: int, others: dict[str, float], top_p: float, num_kept: int
) -> None:
    # masses 1/2, 1/4, 1/8, 1/8 of which all sums are exact
    logits = torch.full((1, vocab_size), -200.0)
    logits[0, :4] = torch.tensor([0.0, -1.0, -2.0, -2.0]) * math.log(2)
    row = sampling_row(seed=1, num_samples=200, top_p=top_p, **others)
    for sampler in (native(level), ReferenceSampler()):
        (result,) = sampler.sample(logits.clone(), [row])
        assert set(token_ids(result)) == set(range(num_kept))
