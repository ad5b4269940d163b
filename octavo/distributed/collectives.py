"""Collective operations of the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from octavo.errors import EngineDeadError


class Collectives:
    """The group of a single rank, which returns its own input as the result; groups of several ranks override the
    methods.

    All ranks of a group make its calls in the same order, one thread of a rank at a time. Each call raises
    EngineDeadError, naming the rank, when a rank does not join before the deadline, and when the group is poisoned.
    After an error the group cannot be used again.

    rank: this rank's number in the group, from 0. size: ranks of the group.
    """

    rank: int = 0
    size: int = 1
    _reason: str | None = None
    """Why the group cannot be used any more; None while it can."""

    @property
    def is_recordable(self) -> bool:
        """Whether a recording of a step (replayed without Python) includes these calls: compiled calls that read
        tensors by address, or calls launched on a stream."""
        return True

    def gather(self, share: Tensor) -> Tensor:
        """Return the shares [..., n] of all ranks side by side in rank order, [..., n x size]."""
        return share

    def sum(self, partial: Tensor) -> Tensor:
        """Return the elementwise sum in float32, bfloat16 or float16; `partial` may be written over.

        Each element is added in float32 in the order of ranks from 0, and rounded once: the bits of a row depend on
        its values alone, not on its place or on the size of the tensor.
        """
        return partial

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Write the source's `tensor` over those of the other ranks, of the same shape and type."""

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to rank `target`, which receives into a tensor of the same shape and type."""
        raise AssertionError("a group of one rank sends nothing")

    def receive(self, tensor: Tensor, source: int) -> None:
        """Write what rank `source` sent next to this rank over `tensor`."""
        raise AssertionError("a group of one rank receives nothing")

    def check(self) -> None:
        """Raise EngineDeadError when the group is poisoned or a call has failed: computed results are then invalid.

        Where the host does not wait for calls, they return before they fail.
        """
        if self._reason is not None:
            raise EngineDeadError(self._reason)

    def watch(self) -> None:
        """Start the deadline for all work launched so far, because a replay without Python does not report its calls to
        the group. Does nothing where the host waits for calls."""

    def poison(self, reason: str) -> None:
        """Make every waiting and later call of all ranks raise EngineDeadError with `reason`; from any thread.

        Ranks of other machines must poison the group there.
        """
        self._reason = self._reason or reason

    def _fail(self, reason: str) -> NoReturn:
        self.poison(reason)
        raise EngineDeadError(reason)

    def close(self) -> None:
        """Release memory and connections. Idempotent."""


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements as bytes, uint8 [bytes]: no library knows every element type."""
    return tensor.view(-1).view(torch.uint8)


def summed(shares: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the sum of the shares of all ranks, as `Collectives.sum` describes it."""
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share.float()
    return total.to(shares[0].dtype)
