"""DeepSeek-VL2's encoder of images: SigLIP by tiles; two by two neighbouring vectors are joined.

The rows of the whole image come first, each with a vector for its end; then one vector, and the rows of all tiles
together. Source: https://arxiv.org/abs/2412.10302.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.vision import ImageReader


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        import transformers

        vision, hidden = library.vision_config, library.text_config.hidden_size
        vision.vision_use_head = False
        made: Any = transformers.SiglipVisionModel
        self.vision: Any = made._from_config(vision)
        del self.vision.embeddings.position_embedding, self.vision.embeddings.position_ids
        count = (vision.image_size // vision.patch_size) ** 2
        self.vision.pos_embed = nn.Parameter(torch.empty(1, count, vision.hidden_size))
        layers = {"0": nn.Linear(4 * vision.hidden_size, hidden), "2": nn.Linear(hidden, hidden)}
        self.projector: Any = nn.ModuleDict({"layers": nn.ModuleDict(layers)})
        self.image_newline = nn.Parameter(torch.empty(hidden))
        self.view_seperator = nn.Parameter(torch.empty(hidden))

    def forward(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """pixels [1 + rows · columns, 3, side, side], the whole image first → [vectors, hidden]."""
        tower, layers = self.vision, self.projector["layers"]
        x = tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2) + tower.pos_embed
        for layer in tower.encoder.layers:
            x = layer(x, None)
        x = tower.post_layernorm(x)
        side = round(x.shape[1] ** 0.5)
        odd = side % 2  # a row and a column of zeros make it even
        x = F.pad(x.view(len(x), side, side, -1), (0, 0, 0, odd, 0, odd))
        side = (side + odd) // 2
        # the numbers of four neighbours stand beside each other, and not their vectors
        x = x.view(len(x), side, 2, side, 2, -1).permute(0, 1, 3, 5, 2, 4).flatten(3)
        x = layers["2"](F.gelu(layers["0"](x)))
        grid = x[1:].view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        end = self.image_newline
        lines = [torch.cat([each, end.expand(len(each), 1, -1)], 1).flatten(0, 1) for each in (x[0], grid)]
        return torch.cat([lines[0], self.view_seperator[None], lines[1]])


class DeepseekVl2Reader(ImageReader):
    """The base class that lets the text model read images."""

    ENCODER = _Encoder
    encoder: _Encoder
    IGNORED = (*ImageReader.IGNORED, r"vision\.attn_pool\..*")

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image.

        arrays: pixel_values [1 + tiles, 3, side, side] and grids [1, (rows, columns)].
        """
        return self.encoder(self.received(arrays["pixel_values"]), *arrays["grids"][0].tolist())
