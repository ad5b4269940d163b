"""The rules of beam search, against a plain search over all sequences and against its own words."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from octavo.core.beam_search import BeamSearch
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.errors import InvalidRequest

VOCABULARY = 8


def distribution(prefix: list[int]) -> list[float]:
    """Log-probabilities that depend on the whole prefix."""
    weights = [random.Random(repr((prefix, token))).random() ** 3 + 1e-3 for token in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def candidates(prefix: list[int], count: int) -> TokenLogprobs:
    logprobs = distribution(prefix)
    order = sorted(range(VOCABULARY), key=lambda token: -logprobs[token])[:count]
    return TokenLogprobs(
        token_id=order[0],
        logprob=logprobs[order[0]],
        top_ids=tuple(order),
        top_logprobs=tuple(logprobs[t] for t in order),
    )


def search(width: int, max_tokens: int, end: frozenset[int] = frozenset(), **params: object) -> BeamSearch:
    given = SamplingParams(use_beam_search=True, best_of=width, max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    beams = BeamSearch(given, max_tokens, end)
    while beams.running:
        beams.step([candidates(beam.token_ids, beams.num_candidates) for beam in beams.running])
    return beams


def test_with_room_for_all_sequences_the_search_is_exhaustive() -> None:
    found = search(VOCABULARY**2 // 2, 2, early_stopping="never").finished
    every = sorted(
        (distribution([])[a] + distribution([a])[b] for a, b in itertools.product(range(VOCABULARY), repeat=2)),
        reverse=True,
    )
    assert [beam.score * 2 for beam in found[:20]] == pytest.approx(every[:20])
    assert all(beam.is_capped for beam in found)


def test_early_stopping_ends_with_as_many_finished_beams_as_the_width() -> None:
    early = search(2, 30, frozenset({0}), early_stopping=True)
    patient = search(2, 30, frozenset({0}), early_stopping="never", length_penalty=2.0)
    assert len(early.finished) == len(patient.finished) == 2
    longest = [max(len(beam.token_ids) for beam in each.finished) for each in (early, patient)]
    assert longest[0] < longest[1]
    assert not any(beam.is_capped for beam in early.finished)


def test_finished_beams_are_sorted_and_their_scores_are_those_of_their_tokens() -> None:
    for penalty in (-1.0, 0.0, 0.7, 1.0, 2.0):
        beams = search(3, 12, frozenset({0, 1}), length_penalty=penalty).finished
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        for beam in beams:
            total = sum(distribution(beam.token_ids[:i])[token] for i, token in enumerate(beam.token_ids))
            assert beam.score == pytest.approx(total / len(beam.token_ids) ** penalty)
            assert [token.token_id for token in beam.logprobs] == beam.token_ids
            assert not {0, 1} & set(beam.token_ids[:-1])


def listed(*logprobs: float) -> TokenLogprobs:
    """Tokens 0, 1, 2, … with these log-probabilities."""
    return TokenLogprobs(
        token_id=0, logprob=logprobs[0], top_ids=tuple(range(len(logprobs))), top_logprobs=tuple(logprobs)
    )


def test_scores_decide_and_log_probabilities_are_reported() -> None:
    beams = BeamSearch(SamplingParams(use_beam_search=True, n=2, max_tokens=1, logprobs=2), 1, frozenset())
    found = TokenLogprobs(
        token_id=7, top_ids=(7, 5, 6, 4), top_logprobs=(-4.0, -2.0, -1.0, -3.0), scores=(71.0, -2.0, -3.0, -math.inf)
    )
    beams.step([found])
    first, second = beams.finished
    assert (first.score, first.token_ids, second.token_ids) == (71.0, [7], [5])
    assert (first.logprobs[0].logprob, first.logprobs[0].rank) == (-4.0, 3)
    assert (second.logprobs[0].logprob, second.logprobs[0].rank) == (-2.0, 2)
    for beam in (first, second):
        assert (beam.logprobs[0].top_ids, beam.logprobs[0].top_logprobs) == ((6, 5), (-1.0, -2.0))


def test_barred_tokens_are_no_candidates_and_fewer_beams_go_on() -> None:
    beams = BeamSearch(SamplingParams(use_beam_search=True, n=3, max_tokens=2, logprobs=5), 2, frozenset())
    first = beams.step([listed(-0.1, -2.0, *[-math.inf] * 4)])
    assert [each.token_ids for each in first] == [[0], [1]]
    assert first[0].path is not None
    assert first[0].path.token.top_ids == (0, 1)
    # one of the two beams has no way on
    assert beams.step([listed(*[-math.inf] * 6), listed(-0.5, *[-math.inf] * 5)]) == []
    assert [beam.token_ids for beam in beams.finished] == [[1, 0]]
    assert beams.finished[0].score == pytest.approx(-2.5 / 2)
    assert not beams.running


def test_a_search_without_a_way_on_ends_with_what_has_finished() -> None:
    beams = BeamSearch(SamplingParams(use_beam_search=True, n=3, max_tokens=9), 9, frozenset({0}))
    assert [each.token_ids for each in beams.step([listed(-0.5, -1.0, *[-math.inf] * 4)])] == [[1]]
    assert beams.step([listed(*[-math.inf] * 6)]) == []
    assert [beam.token_ids for beam in beams.finished] == [[0]]
    nothing = BeamSearch(SamplingParams(use_beam_search=True, n=3, max_tokens=9), 9, frozenset({0}))
    assert nothing.step([listed(*[-math.inf] * 6)]) == []
    assert nothing.finished == []


@pytest.mark.parametrize("num_logprobs", [0, 3, 7])
def test_more_alternatives_than_candidates_are_listed_but_not_searched(num_logprobs: int) -> None:
    given = SamplingParams(use_beam_search=True, n=2, max_tokens=1, logprobs=num_logprobs)
    beams = BeamSearch(given, 1, frozenset())
    assert beams.num_candidates == 4
    assert beams.num_listed == max(4, num_logprobs)
    logprobs = [-float(place) - 1 for place in range(beams.num_listed)]
    beams.step([listed(*logprobs)])
    assert [beam.token_ids for beam in beams.finished] == [[0], [1]]
    for beam in beams.finished:
        assert beam.logprobs[0].top_logprobs == tuple(logprobs[:num_logprobs])


def test_never_hopes_for_length_where_length_is_rewarded() -> None:
    """Finished at -1.6 and -1.7; running at -3, which would be -0.75 after four tokens."""
    for length_penalty, goes_on in ((-1.0, False), (0.0, False), (1.0, True)):
        given = SamplingParams(
            use_beam_search=True, n=2, max_tokens=4, early_stopping="never", length_penalty=length_penalty
        )
        beams = BeamSearch(given, 4, frozenset({0, 1}))
        beams.step([listed(-1.6, -1.7, -3.0, -3.5, -4.0, -4.5)])
        assert bool(beams.running) is goes_on


def test_never_does_not_give_up_where_length_is_punished() -> None:
    """Finished at -1 and -2.1 * 2; running at -0.15, which is -0.3 now, and -15 only after a hundred tokens."""
    given = SamplingParams(use_beam_search=True, n=2, max_tokens=100, early_stopping="never", length_penalty=-1.0)
    beams = BeamSearch(given, 100, frozenset({0}))
    likely = TokenLogprobs(token_id=2, top_ids=(2, 0, 3, 4), top_logprobs=(-0.1, -1.0, -3.0, -4.0))
    beams.step([likely])
    later = TokenLogprobs(token_id=2, top_ids=(2, 0, 3, 4), top_logprobs=(-0.05, -2.0, -9.0, -9.5))
    beams.step([later, later])
    assert [beam.score for beam in beams.finished] == pytest.approx([-1.0, -4.2])
    assert beams.running


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"use_beam_search": True, "top_k": 4}, "top_k"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "min_p": 0.5}, "min_p"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stop": "x", "detokenize": False}, "stop"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": 0}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": None}, "early_stopping"),
        ({"early_stopping": 0}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_contradictions_are_refused_by_name(params: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_early_stopping_may_come_as_a_word() -> None:
    assert SamplingParams(use_beam_search=True, early_stopping="True").early_stopping is True
    assert SamplingParams(use_beam_search=True, early_stopping="never").early_stopping == "never"


def test_a_long_search_costs_and_ends_like_a_short_one() -> None:
    """Paths are chains: a search of many steps neither copies them nor recurses through them."""
    given = SamplingParams(use_beam_search=True, best_of=2, max_tokens=5000)
    beams = BeamSearch(given, 5000, frozenset())
    found = TokenLogprobs(token_id=1, logprob=-0.5, top_ids=(1, 2, 3, 4), top_logprobs=(-0.5, -1.5, -2.5, -3.5))
    while beams.running:
        beams.step([found] * len(beams.running))
    assert beams.finished[0].token_ids == [1] * 5000
    assert beams.finished[1].token_ids.count(2) == 1
