"""The encoder of NVIDIA's models of pages and of Eagle 2.5: SigLIP by tiles; two by two neighbouring vectors are
joined.

Source: https://arxiv.org/abs/2501.14818 (Eagle 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.vision import ImageReader


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        import transformers

        made: Any = transformers.SiglipVisionModel
        library.vision_config.vision_use_head = False
        self.vision_model: Any = made._from_config(library.vision_config)
        width, hidden = 4 * library.vision_config.hidden_size, library.text_config.hidden_size
        self.mlp1 = nn.ModuleDict(
            {"0": nn.LayerNorm(width), "1": nn.Linear(width, hidden), "3": nn.Linear(hidden, hidden)}
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [tiles, 3, side, side] → [vectors of all tiles, hidden]."""
        x = self.vision_model(pixels).last_hidden_state
        side = round(x.shape[1] ** 0.5) // 2
        joined = x.view(len(x), side, 2, side, 2, -1).transpose(2, 3).reshape(len(x) * side * side, -1)
        return self.mlp1["3"](F.gelu(self.mlp1["1"](self.mlp1["0"](joined))))


class SiglipReader(ImageReader):
    """The base class that lets the text model read images."""

    ENCODER = _Encoder
    encoder: _Encoder
    IGNORED = (*ImageReader.IGNORED, r"vision_model\.head\..*")

    def own_name(self, name: str) -> str:
        return re.sub(r"^(?:model\.)?vision_model\.vision_model\.", "vision_model.", super().own_name(name))

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image.

        arrays: pixel_values [tiles, 3, side, side].
        """
        return self.encoder(self.received(arrays["pixel_values"]))
