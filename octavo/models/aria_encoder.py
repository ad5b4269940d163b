"""Aria's encoder of images: SigLIP; learned queries read its vectors, as many queries as the config says.

Source: https://arxiv.org/abs/2410.05993.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.models.config import DecoderConfig
from octavo.models.fallback.swap import stack
from octavo.models.vision import ImageReader


class _Attention(nn.Module):
    """Attention of queries to patches by projections that are layers each, unlike those of torch's class."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, None]:
        """queries [crops, queries, width], keys and values [crops, patches, width], attn_mask [crops · heads, queries,
        patches], True where a patch is hidden → [crops, queries, width]."""
        parts = ((self.q_proj, queries), (self.k_proj, keys), (self.v_proj, values))
        q, k, v = (project(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for project, x in parts)
        seen = None if attn_mask is None else ~attn_mask.view(len(queries), self.num_heads, *attn_mask.shape[1:])
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out_proj(made.transpose(1, 2).flatten(2)), None


class AriaReader(ImageReader):
    """The base class that lets the text model read images."""

    IGNORED = (*ImageReader.IGNORED, r"vision_tower\.post_layernorm\..*")

    def _of_library(self, library: Any) -> nn.Module:
        made: Any = super()._of_library(library)
        vision, cross = library.vision_config, made.multi_modal_projector.cross_attn
        made.vision_tower.post_layernorm = nn.Identity()  # nothing reads what it makes
        cross.multihead_attn = _Attention(vision.hidden_size, vision.num_attention_heads)
        return made

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        if self.is_first:
            attention = self.encoder.get_submodule("multi_modal_projector.cross_attn.multihead_attn")
            stack(attention, ("q_proj", "k_proj", "v_proj"), "in_proj")

    def own_name(self, name: str) -> str:
        return super().own_name(name).replace(".multihead_attn.in_proj_", ".multihead_attn.in_proj.")
