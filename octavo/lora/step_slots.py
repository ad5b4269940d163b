"""The slots of the step that is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StepSlots:
    """The slot of each token of the step that is computed, and on the host room for addends. Both stay at their
    addresses."""

    def __init__(self, num_tokens: int, outputs: int, device: torch.device) -> None:
        self._slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._outputs = outputs
        self.of_row: Tensor | None = None
        """int32 [rows of products], which are those of tokens; None where no token has an adapter."""
        self._room = torch.empty(num_tokens * outputs if device.type == "cpu" else 0)

    def set(self, slot_of_token: Tensor) -> None:
        """Set the slots of the step that is computed next."""
        self.of_row = self._slots[: len(slot_of_token)]
        self.of_row.copy_(slot_of_token)

    def room_for(self, num_rows: int) -> Tensor:
        """Return room for the addend of so many rows: an encoder's output may have more than a step has tokens."""
        is_enough = num_rows * self._outputs <= len(self._room) or not len(self._room)
        return self._room if is_enough else torch.empty(num_rows * self._outputs)

    @contextmanager
    def with_adapters(self, slot_of_row: Tensor) -> Iterator[None]:
        """Let products in the context have other rows than the step's tokens, with these slots, int32 [rows]."""
        before, self.of_row = self.of_row, slot_of_row
        try:
            yield
        finally:
            self.of_row = before
