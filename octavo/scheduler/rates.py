"""How fast this engine computes prompts and moves blocks, assumed at first and then measured step by step, and how much
of a prompt keeps a step short.

All of it comes from the times that are passed to the scheduler and from the results of steps, so the replay of a
recorded run measures the same.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

_FEWEST_TOKENS: Final = 32
"""A step with fewer prompt tokens says more about its fixed cost than about prompts."""
_MEMORY: Final = 0.8
"""Weight of a step relative to the next one: the mean covers about five steps."""
_TARGET_RATIO: Final = 2.5
"""A step that computes prompts while others decode may take this many times as long as one that only decodes."""
_SHORTEST_TARGET_S: Final = 0.02
"""A step may always take this long: readers notice no shorter gaps, and small chunks cost a fast model throughput."""
_RATIO_PER_SHARE: Final = 10.0
"""How much that ratio grows with the share of such steps beyond one half: then they are the usual ones, and their time
is the median of the times between tokens."""
_SHARE_STEPS: Final = 512
"""Steps over which that share is a mean, older ones counting less."""
_SMALLEST_PIECE: Final = 16
"""Prompt tokens that a step computes whatever they take, so that prompts always advance."""
_ALIKE: Final = 1.5
"""Steps whose numbers of decoding rows differ by a smaller factor take about equally long."""
_FEWEST_UNMEASURED, _MOST_UNMEASURED = 16, 128
"""Steps with prompts between two that only decode: where the number of decoding rows has changed, and where not."""
_OUTLIER: Final = 2.0
"""A step counts as at most this many times as long as expected: a paused process says nothing about the next step."""


class PreemptionCosts(NamedTuple):
    """The rates that `preemption_mode` auto assumes until they have been measured."""

    prefill_tokens_per_s: float = 2000.0
    swap_bytes_per_s: float = 4e9


class _Mean:
    """Amount per second over recent samples, those that took longer counting more."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """The rate; None before the first sample."""
        return self._amount / self._seconds if self._seconds > 0 else None

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _MEMORY + amount
        self._seconds = self._seconds * _MEMORY + seconds


class Pace:
    """The prompt tokens of a step in which other sequences decode.

    `target_step_s` is what the step may take; None: `_TARGET_RATIO` times a step that only decodes, and more where most
    steps compute prompts, but at least `_SHORTEST_TARGET_S`; 0: any time. That target times the measured tokens per
    second of such steps gives their tokens. The rate is one of steps of this very size, so it holds whether a step's
    time is that of reading the weights, of arithmetic, or their sum.
    """

    def __init__(self, target_step_s: float | None = None) -> None:
        self.target_step_s = target_step_s
        self._decode_s: float | None = None
        self._measured_rows = 0
        self._num_decode_rows = 0
        self._num_unmeasured = 0
        self._was_decoding = False
        self._mixed_share = 0.0
        self._beside = _Mean()

    def num_prompt_tokens(self, num_rows: int, prefill_tokens_per_s: float | None) -> float:
        """Return how many prompt tokens fit beside `num_rows` decoding rows. 0: the step is to measure how long
        decoding takes without prompts.

        Until a step with both was measured, prompts take the time beyond a step without them at the given rate.
        """
        if self.target_step_s == 0:
            return math.inf
        if self.target_step_s is None:
            most = _MOST_UNMEASURED if _are_alike(num_rows, self._num_decode_rows) else _FEWEST_UNMEASURED
            if self._num_unmeasured >= most or not self._num_decode_rows:
                return 0
        ratio = _TARGET_RATIO + _RATIO_PER_SHARE * max(0.0, self._mixed_share - 0.5)
        target_s = self.target_step_s or max(_SHORTEST_TARGET_S, ratio * (self._decode_s or 0.0))
        if (rate := self._beside.value) is not None:
            return max(_SMALLEST_PIECE, target_s * rate - num_rows)
        return max(_SMALLEST_PIECE, (target_s - (self._decode_s or 0.0)) * (prefill_tokens_per_s or 0.0))

    def note_planned(self, step: _Planned) -> None:
        if not step.num_rows:
            return
        if not step.num_prompt_tokens:
            self._num_decode_rows, self._num_unmeasured = step.num_rows, 0
            self._mixed_share -= self._mixed_share / _SHARE_STEPS
        elif step.num_allowed:
            self._num_unmeasured += 1
            self._mixed_share += (1 - self._mixed_share) / _SHARE_STEPS

    def note_done(self, step: _Planned, seconds: float) -> None:
        """Note how long a step took."""
        if not step.num_rows:
            return
        was_decoding, self._was_decoding = self._was_decoding, not step.num_prompt_tokens
        if not step.num_prompt_tokens:
            if self._decode_s is not None:
                growth = max(1.0, step.num_rows / self._measured_rows)
                seconds = min(seconds, _OUTLIER * growth * self._decode_s)
                if _are_alike(step.num_rows, self._measured_rows):
                    # after steps with prompts the older ones are out of date
                    memory = _MEMORY if was_decoding else _MEMORY / 2
                    seconds = memory * self._decode_s + (1 - memory) * seconds
            self._decode_s, self._measured_rows = seconds, step.num_rows
        elif 0 < step.num_allowed <= 2 * step.num_prompt_tokens:
            # a step that could have had many more tokens says little about full steps
            num_tokens = step.num_rows + step.num_prompt_tokens
            if (rate := self._beside.value) is not None:
                seconds = min(seconds, _OUTLIER * num_tokens / rate)
            self._beside.add(num_tokens, seconds)


def _rounded(num_tokens: float) -> int:
    """Return this number of tokens rounded to one of eight sizes per power of two: devices are faster at sizes that
    they have run before.
    """
    unit = max(1, 1 << (int(num_tokens).bit_length() - 4))
    return unit * round(num_tokens / unit)


def _are_alike(num_rows: int, other: int) -> bool:
    return other <= _ALIKE * num_rows and num_rows <= _ALIKE * other


class _Planned(NamedTuple):
    """A submitted step.

    num_prompt_tokens: in rows of more than one token. num_allowed: the most that those could have been beside rows that
    decode; 0 where nothing decodes.
    """

    time: float
    num_rows: int
    num_prompt_tokens: int
    num_allowed: int
    num_moved_bytes: int


class Rates:
    """A given rate is used as it is; None stands for a measured one. `target_step_s`: see `Pace`. last_step_s: how long
    the latest step took."""

    def __init__(
        self,
        costs: PreemptionCosts | None = None,
        prefill_tokens_per_s: float | None = None,
        swap_bytes_per_s: float | None = None,
        target_step_s: float | None = None,
    ) -> None:
        self._costs = costs or PreemptionCosts()
        self._fixed_prefill = prefill_tokens_per_s
        self._fixed_swap = swap_bytes_per_s
        self._prefill = _Mean()
        self._swap = _Mean()
        self.pace = Pace(target_step_s)
        self._planned: deque[_Planned] = deque()
        self._last_end = float("-inf")
        self.last_step_s = 0.0

    @property
    def known_prefill_tokens_per_s(self) -> float | None:
        """Tokens per second, set or measured; None before the first measurement."""
        return self._fixed_prefill or self._prefill.value

    @property
    def prefill_tokens_per_s(self) -> float:
        """The rate that is set or measured, or else the assumed one."""
        return self.known_prefill_tokens_per_s or self._costs.prefill_tokens_per_s

    @property
    def swap_bytes_per_s(self) -> float:
        """Bytes per second in one direction, set, measured or assumed."""
        return self._fixed_swap or self._swap.value or self._costs.swap_bytes_per_s

    def num_prompt_tokens_beside(self, num_rows: int, most: int) -> int:
        """Return how many prompt tokens, at most `most`, the step being planned may compute beside `num_rows` decoding
        rows."""
        wanted = self.pace.num_prompt_tokens(num_rows, self.known_prefill_tokens_per_s)
        return most if wanted >= most else _rounded(num_rows + wanted) - num_rows if wanted else 0

    def note_planned(
        self, now: float, num_rows: int, num_prompt_tokens: int, num_moved_bytes: int = 0, *, num_allowed: int = 0
    ) -> None:
        """Note a submitted step: `num_prompt_tokens` tokens in rows of more than one, in `num_rows` rows altogether,
        and `num_moved_bytes` to or from the host. num_allowed: what `num_prompt_tokens_beside` returned for it.
        """
        step = _Planned(now, num_rows, num_prompt_tokens, num_allowed, num_moved_bytes)
        self.pace.note_planned(step)
        self._planned.append(step)

    def note_done(self, now: float, swap_s: float) -> None:
        """Note that the oldest submitted step has returned. Moving blocks to and from the host took `swap_s` of it."""
        step = self._planned.popleft()
        # with several steps in flight one begins when the one before it ends
        seconds = now - max(step.time, self._last_end) - swap_s
        self._last_end, self.last_step_s = now, seconds
        if seconds > 0:
            if step.num_prompt_tokens >= max(_FEWEST_TOKENS, 2 * step.num_rows):
                self._prefill.add(step.num_prompt_tokens, seconds)
            self.pace.note_done(step, seconds)
        if step.num_moved_bytes and swap_s > 0:
            self._swap.add(step.num_moved_bytes, swap_s)
