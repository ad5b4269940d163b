"""How many guesses of a draft model pay: its own passes take time before any guess is verified."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.speculation.length import LEAST_GAIN, MEMORY, OUTLIER, bucket

_STEPS_BETWEEN_PROBES, _MOST_BETWEEN_PROBES = 128, 4096
"""Steps from one probe to the next: each that changes nothing doubles them."""
_PROBED_TOKENS: Final = 2
_STEPS_PER_CHOICE: Final = 8
"""Steps for which a choice stays, while as many sequences run."""
_STEPS_WITHOUT: Final = 32
"""Steps for which the choice to guess nothing stays."""


class DraftCosts:
    """Seconds of a forward pass of the draft model by its rows: measured, and between measurements interpolated."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}

    def note(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Count the passes of one step. A single step that took very long says little."""
        key, seconds = bucket(num_rows), seconds / num_passes
        known = self._measured.get(key)
        if known is not None:
            # the first passes take longer than those after them
            weight = MEMORY if seconds > known else 1 - MEMORY
            seconds = weight * known + (1 - weight) * min(seconds, OUTLIER * known)
        self._measured[key] = seconds

    def pass_s(self, num_rows: int) -> float | None:
        """Return the seconds of a pass with so many rows; None before one is measured."""
        if not self._measured:
            return None
        keys = sorted(self._measured)
        return float(np.interp(num_rows, keys, [self._measured[key] for key in keys]))


class ProposalLength:
    """Chooses how many tokens the draft model guesses for each row: as many as make tokens per second most.

    Where none pay, a few are guessed now and then for one row, so that a change is noticed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_idle, self._num_between = 0, _STEPS_BETWEEN_PROBES
        self._last = (0, 0)
        self._num_since = _STEPS_WITHOUT

    def kept(self, num_rows: int) -> tuple[int, int] | None:
        """Return the last choice where it was made for as many rows a few steps ago; None to choose anew."""
        self._num_since += 1
        num_steps = _STEPS_PER_CHOICE if self._last[1] else _STEPS_WITHOUT
        if self._num_since >= num_steps or (self._last[1] and self._last[1] != num_rows):
            return None
        if not self._last[1]:
            self._num_idle += 1
        return self._last

    def choose(
        self, costs: NDArray[np.float64], num_rows: int, probability: float, pass_s: float | None
    ) -> tuple[int, int]:
        """Return (tokens, rows). costs: seconds of steps by their tokens. probability: that a guess is right, if those
        before it were. pass_s: seconds of a pass of the draft model with `num_rows`; None where it is not known."""
        self._num_since = 0
        self._last = self._chosen(costs, num_rows, probability, pass_s)
        chosen = self._last
        if chosen[1] != num_rows:  # a probe is made once
            self._last = (0, 0)
        return chosen

    def _chosen(
        self, costs: NDArray[np.float64], num_rows: int, probability: float, pass_s: float | None
    ) -> tuple[int, int]:
        if not 0 < num_rows < len(costs):
            return self._probe(num_rows)
        if pass_s is None:
            return self._most, num_rows
        counts = np.arange(1, min(self._most, (len(costs) - 1) // num_rows - 1) + 1)
        if not len(counts):
            return self._probe(num_rows)
        expected = num_rows * (1 + np.cumsum(probability**counts))
        rates = expected / (costs[num_rows * (1 + counts)] + counts * pass_s)
        best = int(rates.argmax())
        if rates[best] <= LEAST_GAIN * num_rows / costs[num_rows]:
            return self._probe(num_rows)
        self._num_idle, self._num_between = 0, _STEPS_BETWEEN_PROBES
        return best + 1, num_rows

    def _probe(self, num_rows: int) -> tuple[int, int]:
        self._num_idle += 1
        if num_rows < 1 or self._num_idle < self._num_between:
            return 0, 0
        self._num_idle, self._num_between = 0, min(2 * self._num_between, _MOST_BETWEEN_PROBES)
        return min(_PROBED_TOKENS, self._most), 1
