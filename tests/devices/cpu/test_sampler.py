"""What surrounds the compiled sampler; what it draws is tested in tests/conformance."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.devices.cpu.sampler import NativeSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.metadata import RowSamples
from octavo.sampling.processors import ProcessedRow, default_processors
from tests.conformance.runtimes import LEVELS, REFERENCE, runtime
from tests.sampling.sequences import FakeSequence, sampling_row

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")


class OnlyEven:
    """Bars odd tokens for requests whose seed is even, and everything from the seed 100 on."""

    name = "only_even"

    def __init__(self) -> None:
        self._rows: Sequence[ProcessedRow] = ()

    def needs(self, params: SamplingParams) -> bool:
        return (params.seed or 0) % 2 == 0

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows = rows

    def apply(self, logits: Tensor) -> None:
        for each in self._rows:
            seed = each.sequence.params.seed or 0
            logits[each.row, 1::2] = -math.inf
            if seed >= 100:
                logits[each.row] = -math.inf


def make_logits(rows: int, vocab_size: int = 257) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3


def native(*processors: Any) -> NativeSampler:
    return NativeSampler(runtime(LEVELS[0]).cpu, processors)


def test_processors_of_ones_own_act_before_the_compiled_sampler() -> None:
    logits = make_logits(6)
    rows = [sampling_row(seed=seed, logprobs=2, num_samples=3, temperature=1.5) for seed in range(6)]
    found = native(OnlyEven()).sample(logits.clone(), rows)
    expected = REFERENCE.sampler([OnlyEven()]).sample(logits.clone(), rows)
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        drawn = [token.token_id for token in one.tokens]
        assert drawn == [token.token_id for token in other.tokens]
        # those of the model, not of what a processor made of it
        assert list(one.tokens[0].top_ids) == logits[row].topk(2).indices.tolist()
        assert one.tokens[0].logprob == pytest.approx(other.tokens[0].logprob, abs=2e-6)
        assert all(token_id % 2 == 0 for token_id in drawn) or row % 2


class Ascending(OnlyEven):
    """Adds more to larger token ids."""

    def apply(self, logits: Tensor) -> None:
        for each in self._rows:
            logits[each.row] += torch.linspace(0, 9, logits.shape[1])


def test_a_processor_that_is_built_in_but_not_compiled_acts_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    every = (*default_processors(), Ascending())
    monkeypatch.setattr("octavo.devices.cpu.sampler.default_processors", lambda: every)
    prompt = tuple(range(100, 257))
    rows = [
        sampling_row(prompt=prompt, seed=seed, num_samples=20, repetition_penalty=1.8, temperature=temperature)
        for seed, temperature in ((2, 3.0), (4, 0.0), (5, 3.0))
    ]
    found, expected = native(), ReferenceSampler(every)
    for one, other in zip(found.sample(make_logits(3), rows), expected.sample(make_logits(3), rows), strict=True):
        assert [each.token_id for each in one.tokens] == [each.token_id for each in other.tokens]
    ranked = [sampler.rank(make_logits(3), rows, [3] * 3) for sampler in (found, expected)]
    for one, other in zip(*ranked, strict=True):
        assert one.candidates is not None
        assert other.candidates is not None
        assert list(one.candidates.top_ids) == list(other.candidates.top_ids)


def test_errors_tell_what_the_model_did_from_what_processors_did() -> None:
    logits = make_logits(3)
    logits[1, 7] = math.nan
    results = native(OnlyEven()).sample(logits, [sampling_row(seed=seed) for seed in (100, 2, 4)])
    barred, unsound, sound = (result.error for result in results)
    assert barred is not None
    assert "its logits processors bar every token" in barred.message
    assert not barred.is_client_error
    assert unsound is not None
    assert "NaN" in unsound.message
    assert sound is None


def test_rows_whose_tokens_are_all_barred_or_overflow_say_by_what() -> None:
    logits = make_logits(3)
    logits[0, [3, 9]] = -math.inf
    logits[1, 1] = 1e38
    rows = [
        sampling_row(allowed_token_ids=[3, 9]),
        sampling_row(repetition_penalty=0.01),
        sampling_row(temperature=0.0),
    ]
    barred, overflow, sound = (result.error for result in native().sample(logits, rows))
    assert barred is not None
    assert "allowed_token_ids bar every token" in barred.message
    assert (barred.field, barred.code, barred.is_client_error) == ("allowed_token_ids", "invalid_value", True)
    assert overflow is not None
    assert "overflow under repetition_penalty" in overflow.message
    assert (overflow.field, overflow.is_client_error) == ("repetition_penalty", True)
    assert sound is None


def test_what_a_sequence_has_said_is_counted_as_it_grows() -> None:
    logits = make_logits(1, 40)
    params = SamplingParams(
        temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=6, max_tokens=12, bad_words=("x",)
    )
    sequences = [
        FakeSequence(params, end_token_ids=(int(logits.argmax()),), bad_words_token_ids=((5, 6), (7,)))
        for _ in range(2)
    ]
    samplers = (native(), ReferenceSampler())
    for _ in range(12):
        for sampler, sequence in zip(samplers, sequences, strict=True):
            (result,) = sampler.sample(logits.clone(), [sequence.row()])
            sequence.output.append(result.tokens[0].token_id)
    assert sequences[0].output == sequences[1].output
    assert len(set(sequences[0].output)) > 3


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(IndexError, match="outside the vocabulary"):
        native().sample(make_logits(1, 8), [sampling_row(logit_bias={8: 1.0})])
    with pytest.raises(IndexError, match="outside the vocabulary"):
        native().describe(make_logits(1, 8), [8], 0)


def test_describing_rows_without_numbers_gives_no_number() -> None:
    logits = make_logits(2)
    logits[0, 9] = math.nan
    unsound, sound = native().describe(logits, [9, 9], 1)
    assert math.isnan(unsound.logprob or 0)
    assert sound.logprob == pytest.approx(torch.log_softmax(logits[1], -1)[9].item(), abs=2e-6)


def test_beams_get_the_likeliest_tokens_after_the_processors() -> None:
    logits = make_logits(6)
    rows = [
        sampling_row(),
        sampling_row(repetition_penalty=3.0, logit_bias={200: 9.0}),
        sampling_row(allowed_token_ids=[9, 4, 7]),
        sampling_row(),
        sampling_row(allowed_token_ids=[9]),
        sampling_row(logit_bias={1: 1.0}),
    ]
    logits[3, 0] = logits[5, 0] = math.nan
    logits[4, 9] = -math.inf
    counts = [4, 6, 5, 1, 3, 2]
    found = native().rank(logits.clone(), rows, counts)
    expected = ReferenceSampler().rank(logits.clone(), rows, counts)
    for one, other in zip(found[:3], expected[:3], strict=True):
        check_equal(one, other)
    assert (found[3], found[5]) == (expected[3], expected[5])
    for place in (3, 5):
        error = found[place].error
        assert error is not None
        assert "NaN" in error.message
        assert not error.is_client_error
    # nothing may follow: that ends a beam, not a request
    assert found[4].error is None
    assert found[4].candidates is not None
    assert found[4].candidates.top_logprobs == (-math.inf,) * 3
    # a row is the same alone
    for place, row in enumerate(rows):
        assert native().rank(logits[place : place + 1].clone(), [row], [counts[place]]) == [found[place]]


def test_what_the_processors_leave_is_not_normalised_again() -> None:
    logits = make_logits(2)
    rows = [sampling_row(allowed_token_ids=[9, 4, 7]), sampling_row(logit_bias={4: 2.0, 9: -1.0})]
    logprobs = torch.log_softmax(logits, dim=-1)
    for sampler in (native(), ReferenceSampler()):
        barred, biased = (result.candidates for result in sampler.rank(logits.clone(), rows, [5, 257]))
        assert barred is not None
        assert biased is not None
        known = dict(zip(barred.top_ids, barred.top_logprobs, strict=True))
        for token in (9, 4, 7):
            assert known[token] == pytest.approx(logprobs[0, token].item(), abs=2e-6)
        assert (barred.top_logprobs[3:], barred.scores) == ((-math.inf,) * 2, ())
        found = dict(zip(biased.top_ids, zip(biased.scores, biased.top_logprobs, strict=True), strict=True))
        for token, bias in ((4, 2.0), (9, -1.0), (5, 0.0)):
            score, logprob = found[token]
            assert score == pytest.approx(logprobs[1, token].item() + bias, abs=2e-6)
            assert logprob == pytest.approx(logprobs[1, token].item(), abs=2e-6)


def scores_of(result: RowSamples) -> list[float]:
    assert result.candidates is not None
    return result.candidates.scores or result.candidates.top_logprobs


def check_equal(one: RowSamples, other: RowSamples) -> None:
    """The same candidates of two samplers, in the same order; barred ones have no ids."""
    assert one.error == other.error
    assert one.candidates is not None
    assert other.candidates is not None
    assert one.candidates.top_logprobs == pytest.approx(other.candidates.top_logprobs, abs=1e-5)
    assert scores_of(one) == pytest.approx(scores_of(other), abs=1e-5)
    count = sum(value > -math.inf for value in scores_of(one))
    assert one.candidates.top_ids[:count] == other.candidates.top_ids[:count]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab_size", [40, 1000, 40_000])
def test_beams_are_ranked_as_the_reference_ranks_them(level: str, vocab_size: int) -> None:
    source = random.Random(vocab_size)
    logits = make_logits(60, vocab_size)
    rows = []
    for _ in range(len(logits)):
        some = source.sample(range(vocab_size), 30)
        settings: dict[str, Any] = {
            "allowed_token_ids": source.choice([None, None, some[:12], some]),
            "logit_bias": source.choice([None, {token: source.uniform(-9, 9) for token in some[5:20]}]),
            "repetition_penalty": source.choice([1.0, 1.0, 1.3, 0.7]),
            "frequency_penalty": source.choice([0.0, 0.5]),
            "presence_penalty": source.choice([0.0, -0.4]),
            "bad_words": source.choice([(), ("x",)]),
            "min_tokens": source.choice([0, 99]),
            "max_tokens": 99,
        }
        words = ((some[6],), (some[0],)) if settings["bad_words"] else ()
        sequence = FakeSequence(SamplingParams(**settings), end_token_ids=tuple(some[:3]), bad_words_token_ids=words)
        sequence.output += source.choices(some, k=source.choice([0, 5, 90]))
        rows.append(sequence.row(0))
    counts = [source.choice([1, 4, 30]) for _ in rows]
    sampler = NativeSampler(runtime(level).cpu)
    found = sampler.rank(logits.clone(), rows, counts)
    expected = ReferenceSampler().rank(logits.clone(), rows, counts)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        check_equal(one, other)
        assert sampler.rank(logits[place : place + 1].clone(), [rows[place]], [counts[place]]) == [one]


def test_ranking_says_what_is_wrong_with_a_row() -> None:
    logits = make_logits(3, 64)
    logits[0] -= 1e30
    logits[0, 5] = 0.0
    rows = [
        sampling_row(repetition_penalty=0.01, logit_bias={5: 100.0}),
        sampling_row(seed=2, logit_bias={3: 100.0}),
        sampling_row(seed=100),
    ]
    found = native(OnlyEven()).rank(logits.clone(), rows, [3, 3, 3])
    expected = REFERENCE.sampler([OnlyEven()]).rank(logits.clone(), rows, [3, 3, 3])
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        native().rank(make_logits(1, 8), [sampling_row(logit_bias={8: 1.0})], [2])


def test_no_rows_give_nothing() -> None:
    assert native().sample(make_logits(0), []) == []
