"""Keye-VL 1.5: it has the encoder of PaddleOCR-VL, and its own projection of the encoder's vectors.

Source: https://arxiv.org/abs/2509.01563.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.vision import ImageReader


class _Projector(nn.Module):
    """Joins neighbours before the norm, where PaddleOCR-VL and Keye-VL normalise each vector by itself."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._side = library.vision_config.spatial_merge_size
        width = library.vision_config.hidden_size * self._side**2
        self.pre_norm = nn.LayerNorm(width, eps=1e-5)
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, library.text_config.hidden_size)

    def forward(self, vectors: Tensor, grids: Tensor) -> Tensor:
        """vectors [patches, width] of one image, grids [1, (times, rows, columns)] → [vectors, hidden]."""
        times, rows, columns = grids[0].tolist()
        side = self._side
        cut = vectors.view(times, rows // side, side, columns // side, side, -1).transpose(2, 3)
        joined = self.pre_norm(cut.reshape(times * rows * columns // side**2, -1))
        return self.linear_2(F.gelu(self.linear_1(joined)))


class KeyeReader(ImageReader):
    """Placed as the base before Qwen3's class, it makes that class Keye-VL 1.5."""

    def _of_library(self, library: Any) -> nn.Module:
        made: Any = super()._of_library(library)
        made.projector = _Projector(library)
        return made
