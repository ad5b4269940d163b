"""Beam search: which continuations of the running beams are kept, which are finished, and when the search ends.

The rules are those of `transformers` (generation/utils.py of release 5), so that ids and scores agree: each step keeps
the best candidates of all beams together; one that ends (by an end token, or the text of a stop string) among the best
`width` joins the finished ones, of which the best `width` by `log-probability / length ** length_penalty` are kept. One
rule is added: a token with the log-probability -inf is barred, and never part of a beam. Where fewer tokens may follow
than there should be beams, the search goes on with fewer, and may end with fewer than `width` or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs


class Path(NamedTuple):
    """The output tokens of a beam, as the last one and the path before it: beams share what they have in common, and
    growing by a token costs the same at any length."""

    before: Path | None
    token: TokenLogprobs


class FinishedBeam(NamedTuple):
    """A sequence that ended: its score, its output tokens, and why it ended."""

    score: float
    path: Path
    is_capped: bool
    """It reached max_tokens without an end."""
    is_stopped_by_text: bool = False
    """Its last token completed a stop string."""

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Return the output tokens with the log-probability at each."""
        return _tokens_of(self.path)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.logprobs]


class Beam(NamedTuple):
    """A running beam.

    logprob: of the whole sequence, as the processors have made it. parent: place of the beam that it continues, among
    those that ran before.
    """

    logprob: float
    path: Path | None = None
    parent: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Return the output tokens."""
        return [token.token_id for token in _tokens_of(self.path)]


class BeamSearch:
    """The search of one request. `step` is called when the candidates of all running beams are known."""

    def __init__(self, params: SamplingParams, max_tokens: int, end_token_ids: frozenset[int]) -> None:
        self.width = params.width
        self.num_candidates = max(2, 1 + len(end_token_ids)) * self.width
        """Per beam and in all; at least `width` of them do not end the sequence."""
        self.num_listed = max(self.num_candidates, params.logprobs or 0)
        """Likeliest tokens to compute after each beam: candidates, and alternatives that the request lists."""
        self.running = [Beam(0.0)]
        self.finished: list[FinishedBeam] = []
        self._num_logprobs = params.logprobs or 0
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids
        self._length = 0
        self._may_improve = True

    def step(self, candidates: Sequence[TokenLogprobs]) -> list[Beam]:
        """Extend the running beams by one token; `candidates[i]` are those of beam `i`. None run at the end."""
        candidates = [_possible(found) for found in candidates]
        ranked = sorted(
            (
                (beam.logprob + score, -number, -place)
                for number, (beam, found) in enumerate(zip(self.running, candidates, strict=True))
                for place, score in enumerate(_scores(found)[: self.num_candidates])
            ),
            reverse=True,
        )[: self.num_candidates]
        self._length += 1
        length = self._length
        survivors: list[Beam] = []
        ended: list[FinishedBeam] = []
        for rank, (logprob, number, place) in enumerate(ranked):
            token = self._described(candidates[-number], -place)
            is_end_token = token.token_id in self._end_token_ids
            is_stopped = not is_end_token and -place in candidates[-number].stop_places
            is_end = is_end_token or is_stopped
            path = Path(self.running[-number].path, token)
            if not is_end and length < self._max_tokens:
                if len(survivors) < self.width:
                    survivors.append(Beam(logprob, path, -number))
            elif rank < self.width:
                score = logprob / length**self._length_penalty
                ended.append(FinishedBeam(score, path, not is_end, is_stopped))
        if self._may_improve and not (self._early_stopping is True and self._is_full):
            merged = sorted(self.finished + ended, key=lambda each: each.score, reverse=True)
            self.finished = merged[: self.width]
        if not survivors or self._has_ended(survivors[0].logprob, length):
            survivors = []
        self.running = survivors
        return survivors

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.width

    def _has_ended(self, best_logprob: float, length: int) -> bool:
        if self._early_stopping is True and self._is_full:
            return True
        if self._is_full:
            hopeful = self._early_stopping == "never" and self._length_penalty > 0
            best_possible = best_logprob / (self._max_tokens if hopeful else length) ** self._length_penalty
            self._may_improve = self._may_improve and best_possible > self.finished[-1].score
        return not self._may_improve

    def _described(self, found: TokenLogprobs, place: int) -> TokenLogprobs:
        """Return the candidate at `place`, with as many of the likeliest alternatives as the request lists."""
        order: Sequence[int] = range(len(found.top_ids))
        if found.scores:
            order = sorted(order, key=lambda each: -found.top_logprobs[each])
        listed = order[: self._num_logprobs]
        return TokenLogprobs(
            token_id=found.top_ids[place],
            logprob=found.top_logprobs[place],
            rank=order.index(place) + 1,
            top_ids=tuple(found.top_ids[each] for each in listed),
            top_logprobs=tuple(found.top_logprobs[each] for each in listed),
        )


def _possible(found: TokenLogprobs) -> TokenLogprobs:
    """Return `found` without the barred tokens, which are the last ones."""
    scores = _scores(found)
    if not scores or scores[-1] > -math.inf:
        return found
    count = scores.index(-math.inf)
    return msgspec.structs.replace(
        found, top_ids=found.top_ids[:count], top_logprobs=found.top_logprobs[:count], scores=found.scores[:count]
    )


def _scores(found: TokenLogprobs) -> tuple[float, ...]:
    return found.scores or found.top_logprobs


def _tokens_of(path: Path | None) -> list[TokenLogprobs]:
    tokens: list[TokenLogprobs] = []
    while path is not None:
        tokens.append(path.token)
        path = path.before
    tokens.reverse()
    return tokens
