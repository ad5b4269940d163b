"""What a step may spend: tokens in its batch, sequences and adapters at once.

A budget's `grant` says how much of `want` is there without taking it; `refund` undoes a `take`.
"""

from __future__ import annotations

from collections.abc import Iterable


class PartialBudget:
    """Grants what is left, down to nothing: a prompt may be computed in pieces.

    for_prompts: how much of `remaining`, if there is as much, sequences with more than one token to compute may take.
    has_declined: a row was granted less than it could use, since the caller last set this to False.
    """

    __slots__ = ("for_prompts", "has_declined", "remaining")

    def __init__(self, limit: int) -> None:
        self.remaining = self.for_prompts = limit
        self.has_declined = False

    @property
    def has_tokens_for_prompts(self) -> bool:
        return self.remaining > 0 and self.for_prompts > 0

    def grant(self, want: int) -> int:
        limit = self.remaining if want <= 1 else min(self.remaining, self.for_prompts)
        if want <= limit:
            return want
        self.has_declined = True
        return limit

    def take(self, amount: int, *, is_prompt: bool = False) -> None:
        self.remaining -= amount
        if is_prompt:
            self.for_prompts -= amount

    def refund(self, amount: int) -> None:
        self.remaining += amount
        if amount > 1:
            self.for_prompts += amount


class WholeBudget(PartialBudget):
    """Grants all or nothing: a group comes in with all sequences that it can still run."""

    __slots__ = ()

    def grant(self, want: int) -> int:
        return want if want <= self.remaining else 0

    def num_missing(self, want: int) -> int:
        """How many of `want` sequences are too many."""
        return max(0, want - self.remaining)

    def refusal(self, want: int) -> str:
        """Why `want` sequences are too many; empty when they are not."""
        return "" if want <= self.remaining else f"needs {want} sequences, {self.remaining} more may run"


class AdapterBudget:
    """`limit` different adapters run at once; requests without one always may. 0 is no limit."""

    __slots__ = ("_in_use", "_limit")

    def __init__(self, limit: int, in_use: Iterable[str | None]) -> None:
        self._limit = limit
        self.count(in_use)

    def count(self, in_use: Iterable[str | None]) -> None:
        """Only these run from here on."""
        self._in_use = {name for name in in_use if name is not None} if self._limit else set[str]()

    def refusal(self, name: str | None) -> str:
        """Why a request for adapter `name` has to wait; empty when it need not."""
        if name is None or not self._limit or name in self._in_use or len(self._in_use) < self._limit:
            return ""
        return f"adapter {name} needs a slot, all {self._limit} are in use (max_loras)"

    def take(self, name: str | None) -> None:
        """A request for adapter `name` runs from here on."""
        if name is not None and self._limit:
            self._in_use.add(name)
