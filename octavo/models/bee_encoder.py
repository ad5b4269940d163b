"""The encoder of Bee: that of LLaVA-OneVision, with a norm before its projection, which is four times as wide.

Source: https://arxiv.org/abs/2510.13795.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.vision import ImageReader


class _Projector(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width, eps=1e-6)
        self.linear_1 = nn.Linear(width, 4 * hidden)
        self.linear_2 = nn.Linear(4 * hidden, hidden)

    def forward(self, vectors: Tensor) -> Tensor:
        """vectors [tiles, patches, width] → [tiles, patches, hidden]."""
        return self.linear_2(F.gelu(self.linear_1(self.pre_norm(vectors))))


class BeeReader(ImageReader):
    """Placed as the base before a text model's class, it makes that class Bee."""

    def _of_library(self, library: Any) -> nn.Module:
        made: Any = super()._of_library(library)
        made.multi_modal_projector = _Projector(library.vision_config.hidden_size, library.text_config.hidden_size)
        return made
