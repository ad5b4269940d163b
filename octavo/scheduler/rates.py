"""How fast this engine computes prompts and moves blocks: assumed at first, then measured step by step.

Everything comes from the times that the scheduler is told and from the results of steps, so a recorded run measures the
same when it is replayed.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from octavo.core.step import BlockOps

_FEWEST_TOKENS: Final = 32
"""A step with fewer prompt tokens says more about its fixed cost than about prompts."""
_MEMORY: Final = 0.8
"""What an older step counts beside the one after it: about five steps make the mean."""


class PreemptionCosts(NamedTuple):
    """What `preemption_mode` auto reckons with until it has been measured, and the size of a block over all layers."""

    prefill_tokens_per_s: float = 2000.0
    swap_bytes_per_s: float = 4e9
    block_bytes: int = 1 << 20


class _Mean:
    """Amount per second over recent samples, those that took longer counting more."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def value(self) -> float | None:
        """None before the first sample."""
        return self._amount / self._seconds if self._seconds > 0 else None

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _MEMORY + amount
        self._seconds = self._seconds * _MEMORY + seconds


class _Planned(NamedTuple):
    """A step on its way."""

    time: float
    num_tokens: int
    is_sample: bool
    num_moved_blocks: int


class Rates:
    """A rate set by whoever knows it is taken as it is; None has it measured."""

    def __init__(
        self,
        costs: PreemptionCosts | None = None,
        prefill_tokens_per_s: float | None = None,
        swap_bytes_per_s: float | None = None,
    ) -> None:
        self._costs = costs or PreemptionCosts()
        self._fixed_prefill = prefill_tokens_per_s
        self._fixed_swap = swap_bytes_per_s
        self._prefill = _Mean()
        self._swap = _Mean()
        self._planned: deque[_Planned] = deque()
        self._last_end = float("-inf")

    @property
    def known_prefill_tokens_per_s(self) -> float | None:
        """Set or measured; None while it would be a guess."""
        return self._fixed_prefill or self._prefill.value

    @property
    def prefill_tokens_per_s(self) -> float:
        """The same, or the assumption."""
        return self.known_prefill_tokens_per_s or self._costs.prefill_tokens_per_s

    @property
    def swap_bytes_per_s(self) -> float:
        """One way: set, measured or assumed."""
        return self._fixed_swap or self._swap.value or self._costs.swap_bytes_per_s

    @property
    def block_bytes(self) -> int:
        """Of a block over all layers."""
        return self._costs.block_bytes

    def note_planned(self, now: float, num_rows: int, num_prompt_tokens: int, ops: BlockOps) -> None:
        """A step is submitted: `num_prompt_tokens` tokens in rows of more than one, in `num_rows` rows altogether."""
        is_sample = num_prompt_tokens >= max(_FEWEST_TOKENS, 2 * num_rows)
        self._planned.append(_Planned(now, num_prompt_tokens, is_sample, len(ops.swap_outs) + len(ops.swap_ins)))

    def note_done(self, now: float, swap_s: float) -> None:
        """The oldest submitted step has returned. `swap_s`: what moving blocks to and from the host took of it."""
        step = self._planned.popleft()
        # with several steps in flight one begins when the one before it ends
        seconds = now - max(step.time, self._last_end) - swap_s
        self._last_end = now
        if step.is_sample and seconds > 0:
            self._prefill.add(step.num_tokens, seconds)
        if step.num_moved_blocks and swap_s > 0:
            self._swap.add(step.num_moved_blocks * self._costs.block_bytes, swap_s)
