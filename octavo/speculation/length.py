"""How many guesses pay: the measured time of steps by their tokens, and how often guesses were right."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_TOKENS: Final = 256
"""Steps with more tokens carry no guesses: arithmetic takes their time, and a guess costs as much as a token."""
_FREE_TOKENS: Final = 12
"""Tokens of a step that take as long as one, until it is measured: their time is that of reading the weights."""
MEMORY: Final = 0.8
OUTLIER: Final = 2.0
"""A step counts as at most this many times as long as expected."""
_VALID_NOTES: Final = 1024
"""Steps after which a measurement is forgotten, so that what seemed not to pay is tried again."""
_COLD_NOTES: Final = 2
"""The first steps of a size take longer than later ones: buffers grow, and kernel calls are recorded."""
_NOTES_PER_CURVE: Final = 8
"""The curve is computed again after so many steps, or after one of a size that was not measured yet."""
LEAST_GAIN: Final = 1.05
"""How much faster a step has to be with guesses than without: within less, a measurement says nothing."""
_FORGETTING: Final = 0.95
_PRIOR_TRIED, _PRIOR_RIGHT = 2.0, 1.2
"""The assumed counts of a kind of guesses before any was compared: tried, and right."""
_SHARED_WEIGHT: Final = 4.0
"""Guesses that count for a sequence before its own: those of others of the same kind."""
_FORGETTING_PLACES: Final = 0.99
"""What is left, after a comparison that did not get that far, of how often later guesses were right."""
Chances = float | NDArray[np.float64]
"""The probability that a guess is right, if those before it were: of every guess, or of each by its place."""


class StepCosts:
    """Seconds of a step without prompts by its tokens: measured, and between measurements interpolated."""

    def __init__(self, first: Sequence[tuple[int, float]] = ()) -> None:
        """first: (tokens, milliseconds) of steps that were measured before this engine started, in rising order."""
        self._counts = np.arange(MOST_TOKENS + 1)
        self._assumed = np.maximum(1.0, self._counts / _FREE_TOKENS)
        self._has_shape = bool(first)
        if first:
            tokens, times = zip(*first, strict=True)
            beyond = np.maximum(1.0, self._counts / tokens[-1])
            self._assumed = np.interp(self._counts, tokens, times) / 1e3 * beyond
        self._measured: dict[int, tuple[float, int]] = {}
        """For each number of tokens: the seconds, and the number of the last note that measured them."""
        self._num_notes = 0
        self._num_cold: dict[int, int] = {}
        """For each number of tokens: how many first steps were left out."""
        self._seconds: NDArray[np.float64] | None = None

    def note(self, num_tokens: int, seconds: float, *, num_alike: int = 0) -> None:
        """Count a step, unless it is one of the first with so many tokens. A single one that took very long says
        little. num_alike: of steps without guesses, how many came one behind another: the first ones of a streak count
        more than later ones, since what was measured before it is old."""
        if not 0 < num_tokens <= MOST_TOKENS or seconds <= 0:
            return
        num_cold = self._num_cold.get(num_tokens, 0)
        if num_cold < _COLD_NOTES:
            self._num_cold[num_tokens] = num_cold + 1
            return
        self._num_notes += 1
        if self._measured:
            seconds = min(seconds, OUTLIER * float(self.seconds()[num_tokens]))
        key = bucket(num_tokens)
        known = self._measured.get(key)
        if known is not None:
            weight = max(1 - MEMORY, 1 / num_alike if num_alike else 0.0)
            seconds = known[0] + weight * (seconds - known[0])
        self._measured[key] = seconds, self._num_notes
        if known is None or self._num_notes % _NOTES_PER_CURVE == 0:
            self._seconds = None

    def seconds(self) -> NDArray[np.float64]:
        """Return the seconds of steps of 0, 1, 2, … `MOST_TOKENS` tokens; only their ratios before one is measured."""
        if self._seconds is None:
            oldest = self._num_notes - _VALID_NOTES
            self._measured = {key: each for key, each in self._measured.items() if each[1] >= oldest}
            self._seconds = self._assumed.copy()
            if keys := sorted(self._measured):
                known = [self._measured[key][0] for key in keys]
                outer = np.clip(self._counts, keys[0], keys[-1])
                if self._has_shape:
                    self._seconds *= np.interp(self._counts, keys, np.array(known) / self._assumed[keys])
                else:
                    self._seconds *= np.interp(self._counts, keys, known) / self._assumed[outer]
                    self._seconds[keys[0] : keys[-1]] = np.interp(self._counts[keys[0] : keys[-1]], keys, known)
            # fewer tokens never take longer: first steps of a size do, which are not recorded yet
            self._seconds = np.minimum.accumulate(self._seconds[::-1])[::-1]
        return self._seconds


def step_tokens(
    num_tokens: int, num_guesses: NDArray[np.int64], num_right: NDArray[np.float64] | NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return the tokens of steps with guesses beside `num_tokens`. num_right: right guesses of the step before, which
    are computed again; None where they are not."""
    repeated = 0 if num_right is None else np.rint(num_right).astype(np.int64)
    tokens: NDArray[np.int64] = np.minimum(num_tokens + num_guesses + repeated, MOST_TOKENS)
    return tokens


def bucket(num_tokens: int) -> int:
    """Return this number of tokens rounded to one of sixteen sizes per power of two."""
    unit = 1 << max(0, num_tokens.bit_length() - 5)
    return min(MOST_TOKENS, unit * round(num_tokens / unit))


def expected_right(chances: Chances, most: int) -> NDArray[np.float64]:
    """Return how many of the first 1, 2, … `most` guesses are expected to be right."""
    chances = np.full(most, chances) if isinstance(chances, float) else chances[:most]
    right: NDArray[np.float64] = np.cumsum(np.cumprod(chances))
    return right


class Tally:
    """How many of the guesses that were compared with what was drawn were right; older ones count less."""

    def __init__(self, tried: float = 0.0, right: float = 0.0) -> None:
        self.tried, self.right = tried, right

    def note(self, num_tried: int, num_right: int) -> None:
        """Count a comparison."""
        self.tried = self.tried * _FORGETTING + num_tried
        self.right = self.right * _FORGETTING + num_right

    def fade(self) -> None:
        """Reduce the weight of earlier counts."""
        self.tried, self.right = self.tried * _FORGETTING_PLACES, self.right * _FORGETTING_PLACES


class Acceptance:
    """The probability that a guess is right, given that the ones before it were."""

    def __init__(self) -> None:
        self._tallies: dict[Hashable, Tally] = {}
        self._places: dict[Hashable, list[Tally]] = {}
        """For each kind: the tallies of guesses by their place behind the known tokens."""

    def note(self, kind: Hashable, own: Tally, num_tried: int, num_right: int) -> None:
        """Count guesses of a kind for all sequences, and for the one that they were made for."""
        self._tally(kind).note(num_tried, num_right)
        own.note(num_tried, num_right)

    def note_places(self, kind: Hashable, num_tried: int, num_right: int) -> None:
        """Count guesses of a kind by their places. What is behind the last one is forgotten slowly, and tried again."""
        places = self._places.setdefault(kind, [])
        places += [Tally() for _ in range(num_tried - len(places))]
        for place, tally in enumerate(places):
            if place < num_tried:
                tally.note(1, int(place < num_right))
            else:
                tally.fade()

    def chances(self, kind: Hashable, own: Tally, most: int) -> NDArray[np.float64]:
        """Return the probabilities of `most` guesses of a kind for a sequence, by place: a later guess of a model is
        right less often. Where little was compared, a place is like the one before it."""
        shared = self._tally(kind)
        factor = self.probability(kind, own) * shared.tried / max(shared.right, 1e-9)
        rate, found = _PRIOR_RIGHT / _PRIOR_TRIED, np.empty(most)
        places = self._places.get(kind, ())
        for place in range(most):
            if place < len(places):
                rate = (places[place].right + _PRIOR_TRIED * rate) / (places[place].tried + _PRIOR_TRIED)
            found[place] = rate
        return np.minimum(found * factor, 1.0)

    def probability(self, kind: Hashable, own: Tally) -> float:
        """Return the probability that a guess of this kind for a sequence is right."""
        shared = self._tally(kind)
        return (own.right + _SHARED_WEIGHT * shared.right / shared.tried) / (own.tried + _SHARED_WEIGHT)

    def _tally(self, kind: Hashable) -> Tally:
        found = self._tallies.get(kind)
        if found is None:
            found = self._tallies[kind] = Tally(_PRIOR_TRIED, _PRIOR_RIGHT)
        return found


class StepBudget:
    """The guesses of one step: as many as make its tokens per second most.

    step_s: seconds of the step without guesses.
    """

    def __init__(
        self, seconds: NDArray[np.float64], num_rows: int, search_s: float = 0.0, *, repeats: bool = False
    ) -> None:
        """seconds: of steps by their tokens. search_s: what looking for guesses takes on the host. repeats: whether the
        next step computes right guesses again."""
        self._seconds = seconds
        self._repeats = repeats
        self._num_rows = self._num_tokens = num_rows
        self._num_expected = float(num_rows)
        self.step_s = float(seconds[num_rows])
        self._least_gain = LEAST_GAIN + (search_s / self.step_s if num_rows else 0.0)

    @property
    def gain_s(self) -> float:
        """Return the seconds that the guesses taken so far are expected to save."""
        if self._num_tokens == self._num_rows:
            return 0.0
        return self._num_expected / self._num_rows * self.step_s - float(self._seconds[self._num_tokens])

    @property
    def may_pay(self) -> bool:
        """Whether any guess could pay, if it were certainly right."""
        counts = np.arange(1, len(self._seconds) - self._num_tokens)
        if not len(counts) or not self._num_tokens:
            return False
        tokens = step_tokens(self._num_tokens, counts, counts if self._repeats else None)
        rates = (self._num_expected + counts) / self._seconds[tokens]
        return bool(rates.max() > self._least_gain * self._num_expected / self._seconds[self._num_tokens])

    def take(self, chances: Chances, most: int) -> int:
        """Return how many of `most` guesses for the next sequence pay, and count them."""
        now = self._num_tokens
        counts = np.arange(1, min(most, len(self._seconds) - 1 - now) + 1)
        if not len(counts):
            return 0
        right = expected_right(chances, len(counts))
        expected = self._num_expected + right
        tokens = step_tokens(now, counts, right if self._repeats else None)
        rates = expected / self._seconds[tokens]
        best = int(rates.argmax())
        if rates[best] <= self._least_gain * self._num_expected / self._seconds[now]:
            return 0
        self._num_tokens = int(tokens[best])
        self._num_expected = float(expected[best])
        return best + 1
