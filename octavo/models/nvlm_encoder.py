"""The encoder of NVLM-D: that of InternVL, whose projection is as wide as the text model's MLP and has no biases.

Source: https://arxiv.org/abs/2409.11402.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.models.vision import ImageReader

_ADDED_HEADS: Final = 7
"""Heads of each layer beside those in config.json, with which training split the layers over 8 ranks."""


class _PartNorm(nn.Module):
    """Scales queries or keys by the root mean square of the heads in config.json, those added too."""

    def __init__(self, dim: int, part: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self._part, self._eps = part, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] → [..., dim]."""
        wide = x.float()
        variance = wide[..., : self._part].pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(variance + self._eps)).to(x.dtype) * self.weight


class NvlmReader(ImageReader):
    """Placed as the base before Qwen2's class, it makes that class NVLM-D."""

    @classmethod
    def read_library(cls, c: Checkpoint) -> Any:
        """Return transformers' config of the encoder. Raises CheckpointError or UnsupportedModel."""
        library = super().read_library(c)
        library.projector_hidden_size = c.positive("intermediate_size")
        return library

    def _of_library(self, library: Any) -> nn.Module:
        made: Any = super()._of_library(library)
        projector, width = made.multi_modal_projector, library.projector_hidden_size
        projector.linear_1 = nn.Linear(projector.linear_1.in_features, width, bias=False)
        projector.linear_2 = nn.Linear(width, projector.linear_2.out_features, bias=False)
        for layer in made.vision_tower.encoder.layer:
            _add_heads(layer.attention, library.vision_config.layer_norm_eps)
        return made


def _add_heads(attention: Any, eps: float) -> None:
    """Give an attention of transformers' InternVL the heads that releases of NVLM-D have more."""
    width = attention.embed_dim
    attention.num_heads += _ADDED_HEADS
    # from here on the width of what all heads return
    attention.embed_dim = heads = attention.num_heads * attention.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(width, heads, bias=attention.config.attention_bias))
    attention.projection_layer = nn.Linear(heads, width)
    if attention.config.use_qk_norm:
        attention.q_norm, attention.k_norm = (_PartNorm(heads, width, eps) for _ in range(2))
