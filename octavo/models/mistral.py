"""Mistral: Llama's block with attention over a sliding window. Source: https://arxiv.org/abs/2310.06825."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.linear import QKVLinear, RowLinear
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("MistralForCausalLM",)


class MistralConfig(DecoderConfig):
    """`sliding_window` null means full attention; a config without the key means the first release's 4096."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        """See `ConfigReader.read`."""
        c.expect("hidden_act", "silu")
        window = None if "sliding_window" in c.values and c.values["sliding_window"] is None else 4096
        return cls.common(c, sliding_window=window and c.positive("sliding_window", window))


class Attention(nn.Module):
    """Rotary grouped-query attention over the last tokens."""

    def __init__(self, c: DecoderConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        assert c.rope is not None
        self.qkv_proj = QKVLinear(c.hidden_size, c.heads, mesh)
        self.rope = Rotary(c.rope)
        self.attend = PagedAttention(self.qkv_proj.local_heads, index, sliding_window=c.sliding_window)
        self.o_proj = RowLinear(c.heads.q_size, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        q, k = self.rope(q, k, batch)
        out: Tensor = self.o_proj(self.attend(q, k, v, batch))
        return out


class MistralForCausalLM(GatedDecoder):
    """The whole model."""

    Config = MistralConfig

    def __init__(self, c: MistralConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Attention(c, mesh, index))


MODEL = MistralForCausalLM
