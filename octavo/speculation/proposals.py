"""How many guesses of a draft model pay: its own passes take time before any guess is verified."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import NO_PROPOSALS, Proposals
from octavo.speculation.length import LEAST_GAIN, MEMORY, OUTLIER, Chances, bucket, expected_right, step_tokens

_STEPS_BETWEEN_PROBES, _MOST_BETWEEN_PROBES = 128, 4096
"""Steps from one probe to the next: each that changes nothing doubles them."""
_PROBED_TOKENS: Final = 2
_FIRST_TOKENS: Final = 4
"""Guesses of the steps before anything is known."""
_SHARE: Final = 0.005
"""Share of the time of steps that a draft model may take where its guesses bring nothing."""
_MOST_CREDIT: Final = 32.0
"""Steps whose time it may take at first, and whose time it can lack at most."""
_NEED_OF_PROBES, _NEED_OF_BEGINNINGS = 0.75, 0.5
"""Shares of what can be lacked, from which on nothing is tried, and no prompt computed that begins with new tokens."""
_STEPS_PER_CHOICE: Final = 8
"""Steps for which a choice stays, while as many sequences run."""
_STEPS_PER_STREAK: Final = 12
"""Steps without guesses that are measured in a row while guesses pay, so that their time stays known."""
_FIRST_STREAK, _MOST_BETWEEN_STREAKS = 16, 512
"""Steps with guesses before the first streak, and at most from one to the next, where they double each time."""
_STEPS_WITHOUT: Final = 32
_MOST_WITHOUT: Final = 256
"""Steps for which the choice to guess nothing stays: at first, and at most, where they double each time."""


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


class DraftCredit:
    """The seconds that a draft model may take: a share of the time of steps, and what its guesses have saved."""

    def __init__(self) -> None:
        self._credit_s = self._most_s = self._step_s = 0.0

    def allows(self, need: float) -> bool:
        """Return whether the credit is above -`need`, a share of the most that it can lack; or no step was measured."""
        return self._credit_s > -need * self._most_s or not self._most_s

    def note_step(self, step_s: float) -> None:
        """Count a step without prompts, which took `step_s` without the draft model."""
        is_first, self._step_s, self._most_s = not self._most_s, step_s, _MOST_CREDIT * step_s
        self.note_saved(self._most_s if is_first else _SHARE * step_s)

    def note_steps(self, count: int) -> None:
        """Count steps like the last one."""
        self.note_saved(_SHARE * count * self._step_s)

    def note_saved(self, seconds: float) -> None:
        """Count what guesses are expected to have saved; below 0 what the draft model has taken."""
        self._credit_s = max(-self._most_s, min(self._most_s, self._credit_s + seconds))


class ProposalLength:
    """Chooses how many tokens the draft model guesses for each row: as many as make tokens per second most.

    Where none pay, a few are guessed now and then for one row, so that a change is noticed. Where guesses seem to pay
    and have cost more time than they saved, there are none until half a percent of the time of steps makes up for it.
    """

    def __init__(self, most: int, *, catches_up: bool = False, repeats: bool = False) -> None:
        """catches_up: of what it chooses (`Proposals`). repeats: whether right guesses are computed again."""
        self.credit, self._trials = DraftCredit(), DraftCredit()
        self._most = most
        self._catches_up, self._repeats = catches_up, repeats
        self._num_idle, self._num_between = 0, _STEPS_BETWEEN_PROBES
        self._is_probing = False
        self._last = NO_PROPOSALS
        self._num_since = self._num_without = _STEPS_WITHOUT
        self._num_rows = 0
        self._num_streak = 0
        """Steps that are left of a streak."""
        self._num_until_streak = self._num_between_streaks = _FIRST_STREAK

    def kept(self, num_rows: int) -> Proposals | None:
        """Return the last choice where it was made for as many rows a few steps ago; None to choose anew."""
        self._num_since += 1
        if self._num_streak:
            self._num_streak -= 1
            return NO_PROPOSALS if self._num_streak else None
        num_steps = _STEPS_PER_CHOICE if self._last.num_rows else self._num_without
        if self._num_since >= num_steps or (self._last.num_rows and self._last.num_rows != num_rows):
            return None
        if not self._last.num_rows:
            self._num_idle += 1
        return self._measured(self._last)

    def _measured(self, chosen: Proposals) -> Proposals:
        """Return what was chosen, or nothing where a streak of steps without guesses begins."""
        if not chosen.num_rows:
            return chosen
        self._num_until_streak -= 1
        if self._num_until_streak:
            return chosen
        self._num_between_streaks = min(2 * self._num_between_streaks, _MOST_BETWEEN_STREAKS)
        self._num_until_streak, self._num_streak = self._num_between_streaks, _STEPS_PER_STREAK
        return NO_PROPOSALS

    @property
    def num_left(self) -> int:
        """Return for how many steps `kept` will say that nothing is guessed."""
        # what a probe has measured comes with the results of a step in flight, unless no row could be asked
        is_awaited = self._is_probing and self._num_since < _STEPS_PER_CHOICE
        return 0 if self._last.num_rows or is_awaited else self._num_without - 1 - self._num_since

    def rest(self, count: int) -> None:
        """Leave out `kept` for so many steps."""
        self._num_since += count
        self._num_idle += count
        self.credit.note_steps(count)
        self._trials.note_steps(count)

    def note_step(self, step_s: float, *, is_plain: bool) -> None:
        """Count a step without prompts, which took `step_s` without the draft model. is_plain: it had no guesses."""
        self.credit.note_step(step_s)
        if is_plain:
            self._trials.note_step(step_s)

    def note_saved(self, seconds: float) -> None:
        """Count what a step with guesses has saved, a draft model's time not counted; below 0 what it has cost."""
        self.credit.note_saved(seconds)
        self._trials.note_saved(seconds)

    def note_spent(self, seconds: float) -> None:
        """Count the time of the draft model in a step."""
        self.credit.note_saved(-seconds)
        if self._last.num_rows:
            self._trials.note_saved(-seconds)

    def note_measured(self) -> None:
        """Choose anew, since a pass was measured; what does not pay then is tried again after twice as many steps."""
        if self._is_probing:
            self._is_probing, self._num_since = False, _MOST_WITHOUT
            self._num_between = min(2 * self._num_between, _MOST_BETWEEN_PROBES)

    def drafts_prompt(self, num_computed: int) -> bool:
        """Return whether a prompt, of which so many tokens were found, is computed. Others may find what begins one."""
        return self.credit.allows(0.0 if num_computed else _NEED_OF_BEGINNINGS)

    def choose(self, costs: NDArray[np.float64], num_rows: int, chances: Chances, pass_s: float | None) -> Proposals:
        """costs: seconds of steps by their tokens. chances: that a guess is right, if those before it were.
        pass_s: seconds of a pass of the draft model with `num_rows`; None where it is not known."""
        self._num_since, self._is_probing = 0, False
        self._last = NO_PROPOSALS
        if pass_s is None and 0 < num_rows < len(costs):
            self._last = Proposals(min(_FIRST_TOKENS, self._most), num_rows)
            return self._last
        pays = pass_s is not None and self._trials.allows(0.0)
        if pays and (count := self._paying(costs, num_rows, chances, pass_s or 0.0)):
            self._num_idle, self._num_between = 0, _STEPS_BETWEEN_PROBES
            self._last, self._num_rows = Proposals(count, num_rows, self._catches_up), 0
            return self._last
        self._num_idle += 1
        self._num_without = min(2 * self._num_without, _MOST_WITHOUT) if num_rows == self._num_rows else _STEPS_WITHOUT
        self._num_rows = num_rows
        if not num_rows or self._num_idle < self._num_between or not self.credit.allows(_NEED_OF_PROBES):
            return NO_PROPOSALS
        self._num_idle, self._is_probing = 0, True
        return Proposals(min(_PROBED_TOKENS, self._most), 1)

    def _paying(self, costs: NDArray[np.float64], num_rows: int, chances: Chances, pass_s: float) -> int:
        """Return how many tokens for each row pay most; 0 for none."""
        counts = np.arange(1, min(self._most, (len(costs) - 1) // max(1, num_rows) - 1) + 1)
        if not num_rows or not len(counts):
            return 0
        right = num_rows * expected_right(chances, len(counts))
        tokens = step_tokens(num_rows, num_rows * counts, right if self._repeats else None)
        rates = (num_rows + right) / (costs[tokens] + counts * pass_s)
        best = int(rates.argmax())
        return best + 1 if rates[best] > LEAST_GAIN * num_rows / costs[num_rows] else 0
