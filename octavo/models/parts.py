"""Decoders whose layers read the residual in parts: the embedding, the sum of what each whole group of layers has
added, and the sum of what those behind have added.

Source: Kimi K3's release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.elementwise import Elementwise
from octavo.layers.hyper import AttendedStreams
from octavo.models.blocks import stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.hybrid import HybridConfig, HybridDecoder


@dataclass(frozen=True, kw_only=True)
class PartsConfig(HybridConfig):
    """Adds the layers whose outputs are a part of the residual together."""

    part_layers: int


class PartsLayer(nn.Module):
    """Attention and MLP, each behind a norm of what it attends to of the parts. `carries_residual` is False."""

    def __init__(self, c: PartsConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = stream_norm(c), stream_norm(c)
        self.self_attn, self.mlp = attention, mlp
        self.self_attention_res: nn.Module = AttendedStreams(c.hidden_size, c.norm_eps)
        self.mlp_res = AttendedStreams(c.hidden_size, c.norm_eps)
        self.add = Elementwise("add_to_last")
        self.opens_part = False
        """Whether the layer is the first of a group."""

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:
        """Return (the parts [tokens, parts · hidden], None)."""
        out = self.self_attn(self.input_layernorm(self.self_attention_res(x)), batch)
        x = torch.cat((x, out), 1) if self.opens_part else self.add(x, out)
        return self.add(x, self.mlp(self.post_attention_layernorm(self.mlp_res(x)))), None


class PartsDecoder(HybridDecoder):
    """A stack of these layers; the last norm reads what is attended to of all parts."""

    LAST_STAGE = (*HybridDecoder.LAST_STAGE, "output_attn_res_norm", "output_attn_res_proj")
    carries_residual = False
    config: PartsConfig

    @classmethod
    def of_one_more_layer(cls, c: Checkpoint, config: DecoderConfig) -> Mapping[str, Any]:
        raise UnsupportedModel(
            "speculative_config: the prediction layers of a model with a residual in parts are not read; take another "
            "method"
        )

    def __init__(self, c: PartsConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        for index, layer in self.layers.items():
            cast("PartsLayer", layer).opens_part = int(index) % c.part_layers == 0
        self.output_attn_res = AttendedStreams(c.hidden_size, c.norm_eps) if self.is_last else None

    @property
    def received_size(self) -> int | None:
        """Width of the parts that the stage before has made; None for the first stage."""
        parts = -(-self.layer_range.start // self.config.part_layers) + 1
        return None if self.is_first else parts * self.config.hidden_size

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        assert self.output_attn_res is not None, "only the last stage has it"
        return super().normalize(self.output_attn_res(x), None)

    def _stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return x[:, -self.config.hidden_size :].contiguous()
