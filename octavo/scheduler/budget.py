"""What a step may spend: tokens in its batch, sequences at once.

A budget's `grant` says how much of `want` is there without taking it; `refund` undoes a `take`.
"""

from __future__ import annotations


class PartialBudget:
    """Grants what is left, down to nothing: a prompt may be computed in pieces."""

    __slots__ = ("remaining",)

    def __init__(self, limit: int) -> None:
        self.remaining = limit

    def grant(self, want: int) -> int:
        return want if want <= self.remaining else self.remaining

    def take(self, amount: int) -> None:
        self.remaining -= amount

    def refund(self, amount: int) -> None:
        self.remaining += amount


class WholeBudget(PartialBudget):
    """Grants all or nothing: a group comes in with all sequences that it can still run."""

    __slots__ = ()

    def grant(self, want: int) -> int:
        return want if want <= self.remaining else 0
