"""The slots of the step that is computed."""

from __future__ import annotations

import torch
from torch import Tensor


class StepSlots:
    """The slot of each token of the step that is computed, and on the host room for addends. Both stay at their
    addresses."""

    def __init__(self, num_tokens: int, outputs: int, device: torch.device) -> None:
        self._slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.of_row: Tensor | None = None
        """int32 [tokens]; None where no token has an adapter."""
        self.room = torch.empty(num_tokens * outputs if device.type == "cpu" else 0)

    def set(self, slot_of_token: Tensor) -> None:
        """Take the slots of a step."""
        self.of_row = self._slots[: len(slot_of_token)]
        self.of_row.copy_(slot_of_token)
