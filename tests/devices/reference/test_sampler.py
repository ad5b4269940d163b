from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.devices.reference.sampler import ReferenceSampler, reference_bytes
from octavo.sampling.metadata import SamplingRow
from tests.fakes.allocations import peak_bytes
from tests.sampling.sequences import sampling_row

VOCAB = 257


def make_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits: Tensor, *rows: SamplingRow, sampler: ReferenceSampler | None = None) -> list[list[int]]:
    results = (sampler or ReferenceSampler()).sample(logits.clone(), rows)
    assert all(result.error is None for result in results)
    return [[token.token_id for token in result.tokens] for result in results]


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.9},
    {"seed": 3, "top_k": 5, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.7, "logprobs": 0},
    {"seed": 4, "min_p": 0.1, "frequency_penalty": 0.5, "temperature": 1.3},
    {"seed": 5, "allowed_token_ids": [3, 9, 27]},
    {"seed": 6, "logit_bias": {8: 5.0}, "num_samples": 3, "top_p": 0.5},
    {"seed": 7, "num_samples": 5, "logprobs": 2},
    {"seed": -1, "temperature": 0.2},
    {"seed": 8, "top_p": 0.999, "temperature": 3.0},
    {"seed": 9, "top_k": 200},
    {"seed": 10, "top_k": 3, "top_p": 0.7, "num_samples": 4},
    {"seed": 11, "min_p": 1e-5, "num_samples": 2},
]


def test_greedy_rows_take_the_likeliest_token_and_the_first_of_equals() -> None:
    logits = make_logits(3)
    logits[1, 40] = logits[1, 90] = 100.0
    rows = [sampling_row(temperature=0.0, top_k=3, top_p=0.5, seed=seed) for seed in (1, None, 2)]
    assert drawn(logits, *rows) == [[int(logits[0].argmax())], [40], [int(logits[2].argmax())]]


def test_logprobs_are_those_of_the_models_distribution() -> None:
    logits = make_logits(2)
    row = {"logprobs": 4, "temperature": 0.3, "top_k": 2, "repetition_penalty": 1.9, "logit_bias": {5: 50.0}}
    rows = [sampling_row(seed=3), sampling_row(**row)]
    plain, described = (result.tokens[0] for result in ReferenceSampler().sample(logits.clone(), rows))
    expected = torch.log_softmax(logits[1], -1)
    assert described.token_id == 5
    assert described.logprob == expected[5].item()
    assert described.rank == int((expected > expected[5]).sum()) + 1
    assert list(described.top_ids) == expected.topk(4).indices.tolist()
    assert plain.logprob is None


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * VOCAB, 4 << 20])
def test_given_tokens_are_described_as_drawn_ones_are(chunk_bytes: int) -> None:
    logits = make_logits(5)
    rows = [sampling_row(seed=seed, logprobs=3) for seed in range(5)]
    drawn = [result.tokens[0] for result in ReferenceSampler().sample(logits.clone(), rows)]
    token_ids = [token.token_id for token in drawn]
    assert ReferenceSampler(chunk_bytes=chunk_bytes).describe(logits, token_ids, 3) == drawn


def test_log_probabilities_come_where_the_best_sequences_are_sought() -> None:
    (result,) = ReferenceSampler().sample(make_logits(1), [sampling_row(best_of=2)])
    assert result.tokens[0].logprob is not None


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * VOCAB, 4 << 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_draws_the_same_bits_alone_and_in_any_batch(chunk_bytes: int, threads: int) -> None:
    logits = make_logits(len(MIXED))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = ReferenceSampler(chunk_bytes=chunk_bytes).sample(
            logits.clone(), [sampling_row(**row) for row in MIXED]
        )
        order = [7, 3, 0, 9, 1, 8, 2]
        shuffled = ReferenceSampler().sample(logits[order], [sampling_row(**MIXED[i]) for i in order])
        for place, i in enumerate(order):
            assert shuffled[place] == together[i]
        for i, row in enumerate(MIXED):
            assert ReferenceSampler().sample(logits[i : i + 1].clone(), [sampling_row(**row)]) == [together[i]]
    finally:
        torch.set_num_threads(before)


def test_wide_rows_draw_the_same_bits_alone_and_in_a_batch() -> None:
    # wide enough for torch to split its work between threads
    logits = make_logits(3, vocab_size=70_001)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = [{"seed": 1, "logprobs": 2}, {"seed": 2, "top_p": 0.9, "logprobs": 2}, {"seed": 3, "top_k": 40}]
        together = ReferenceSampler().sample(logits.clone(), [sampling_row(**row) for row in rows])
        for i, row in enumerate(rows):
            assert ReferenceSampler().sample(logits[i : i + 1].clone(), [sampling_row(**row)]) == [together[i]]
    finally:
        torch.set_num_threads(before)


def test_children_of_one_seed_draw_different_tokens_and_each_what_it_would_draw_itself() -> None:
    flat = torch.zeros(1, VOCAB)
    (children,) = drawn(flat, sampling_row(seed=9, num_samples=8))
    assert len(set(children)) > 4
    assert [drawn(flat, sampling_row(seed=9, index=i))[0][0] for i in range(8)] == children


def test_draws_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = 4000
    (tokens,) = drawn(logits, sampling_row(seed=5, temperature=1.5, num_samples=count))
    expected = torch.softmax(logits[0] / 1.5, -1) * count
    chi_square = ((torch.bincount(torch.tensor(tokens), minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, 0.999


def test_seed_and_position_decide_the_draw() -> None:
    flat = torch.zeros(1, 5000)
    first = drawn(flat, sampling_row(seed=1))
    assert drawn(flat, sampling_row(seed=1)) == first
    assert drawn(flat, sampling_row(seed=2)) != first
    assert drawn(flat, sampling_row(seed=1, prompt=(1, 2, 3, 4))) != first


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_numbers_gets_an_error_and_the_others_go_on(bad: float) -> None:
    logits = make_logits(4)
    alone = ReferenceSampler().sample(logits[2:3].clone(), [sampling_row(seed=2, top_p=0.9)])
    logits[0, 5] = logits[1, 0] = bad
    results = ReferenceSampler().sample(
        logits,
        [
            sampling_row(temperature=0.0),
            sampling_row(seed=1),
            sampling_row(seed=2, top_p=0.9),
            sampling_row(temperature=0.0),
        ],
    )
    for result in results[:2]:
        assert result.tokens == []
        assert result.error is not None
        assert "position 3" in result.error.message
        assert "NaN" in result.error.message
    assert results[2] == alone[0]
    assert results[3].error is None


def test_a_row_whose_tokens_are_all_barred_says_by_what() -> None:
    logits = make_logits(1)
    logits[0, [3, 9]] = -math.inf
    (result,) = ReferenceSampler().sample(logits, [sampling_row(allowed_token_ids=[3, 9])])
    assert result.tokens == []
    assert result.error is not None
    assert "allowed_token_ids" in result.error.message


def test_a_plain_greedy_batch_touches_no_processor() -> None:
    class Refusing:
        name = "refusing"

        def needs(self, params: object) -> bool:
            return False

        def update(self, rows: object) -> None:
            raise AssertionError("asked for rows that do not need it")

        apply = update

    assert drawn(make_logits(1), sampling_row(temperature=0.0), sampler=ReferenceSampler([Refusing()]))


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("vocab_size", [300, 20_000])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "logprobs": 20},
        {"top_p": 0.999},
        {"top_k": 10_000, "min_p": 1e-5},
        {"top_p": 0.99, "top_k": 19_000, "logprobs": 20, "repetition_penalty": 1.1, "num_samples": 3},
    ],
)
def test_memory_stays_within_what_is_planned_for(vocab_size: int, spread: float, params: dict[str, Any]) -> None:
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0)) * spread
    rows = [sampling_row(**{"seed": seed, **params}) for seed in range(64)]
    sampler = ReferenceSampler()
    sampler.sample(logits[:1].clone(), rows[:1])
    peak = peak_bytes(lambda: sampler.sample(logits, rows))
    # the results of 192 samples with 20 log-probabilities are no scratch
    assert peak <= reference_bytes(len(rows), vocab_size) + (1 << 20)
