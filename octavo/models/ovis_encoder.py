"""Ovis 2.5's encoder of images: SigLIP 2 for any size, whose joined vectors become shares of a table of vectors.

Source: https://arxiv.org/abs/2508.11737.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.vision import ImageReader

_NUM_INDICATORS = 4
"""Last rows of the table: for begin and end of an image, and of a video."""


class _Encoder(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddle

        vision = library.vision_config
        made: Any = paddle.PaddleOCRVisionModel
        tower: Any = made._from_config(vision)
        del tower.vision_model.post_layernorm
        self.visual_tokenizer: Any = nn.ModuleDict({"vit": tower})
        self._side = vision.spatial_merge_size
        width, rows = vision.hidden_size * self._side**2, library.visual_vocab_size
        parts = {"0": nn.Linear(width, rows - _NUM_INDICATORS, bias=False), "1": nn.LayerNorm(rows - _NUM_INDICATORS)}
        self.visual_tokenizer["head"] = nn.ModuleDict(parts)
        self.vte = nn.Embedding(rows, library.text_config.hidden_size)

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        """patches [patches, 3, patch, patch] by rows, grid [1, (1, rows, columns)] → [vectors, hidden]."""
        tower, (_, rows, columns) = self.visual_tokenizer["vit"].vision_model, grid[0].tolist()
        x = tower.embeddings.patch_embedding(patches).flatten(1)
        places = tower.embeddings.position_embedding.weight
        side = tower.embeddings.num_grid_per_side
        places = F.interpolate(places.view(1, side, side, -1).permute(0, 3, 1, 2), (rows, columns), mode="bicubic")
        x = tower.encoder(inputs_embeds=x + places[0].flatten(1).T, grid_thw=grid).last_hidden_state
        near = x.view(rows // self._side, self._side, columns // self._side, self._side, -1).transpose(1, 2)
        head = self.visual_tokenizer["head"]
        shares = head["1"](head["0"](near.reshape(-1, head["0"].in_features)))
        shares = torch.softmax(shares, -1, dtype=torch.float32).to(x.dtype)
        table = self.vte.weight
        plain, around = table[:-_NUM_INDICATORS], table[-_NUM_INDICATORS:]
        return torch.cat([around[:1], shares @ plain, around[1:2]])


class OvisReader(ImageReader):
    """The base class that lets the text model read images."""

    ENCODER = _Encoder
    encoder: _Encoder
    IGNORED = (*ImageReader.IGNORED, r"visual_tokenizer\.vit\.vision_model\.(?:head|post_layernorm)\..*")

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of an image, with those for its begin and its end.

        arrays: pixel_values [patches, 3, patch, patch] and image_grid_thw [1, (1, rows, columns)] of patches.
        """
        return self.encoder(self.received(arrays["pixel_values"]), arrays["image_grid_thw"])
