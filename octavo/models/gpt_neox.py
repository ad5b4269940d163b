"""GPT-NeoX and Pythia: attention and a plain MLP beside each other, each behind a LayerNorm.

Source: https://arxiv.org/abs/2204.06745.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, GatedLayer, ParallelLayer, PlainMLP
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("GPTNeoXForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """A quarter of each head turns. Queries, keys and values are one tensor, head by head."""

    is_parallel: bool = True

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        if c.values.get("num_key_value_heads") not in (None, c.values.get("num_attention_heads")):
            raise c.error("num_key_value_heads", "num_attention_heads: each head has keys and values of its own")
        bias = c.bool("attention_bias", True)
        return cls.common(
            c,
            rotary_share=0.25,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            qkv_reads=(),
            qkv_by_head=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu"),
            is_parallel=c.bool("use_parallel_residual", True),
        )


class GPTNeoXForCausalLM(GatedDecoder):
    """The whole model."""

    Config = GPTNeoXConfig
    PREFIXES = ("gpt_neox.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "embed_in",
        "norm": "final_layer_norm",
        "lm_head": "embed_out",
        "self_attn": "attention",
        "qkv_proj": "query_key_value",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }
    # causal masks and frequencies that old checkpoints carry along
    IGNORED = (r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",)

    def __init__(self, c: GPTNeoXConfig, mesh: Mesh) -> None:
        layer = partial(ParallelLayer, has_two_norms=True) if c.is_parallel else GatedLayer
        super().__init__(c, mesh, mlp=lambda _: PlainMLP(c, mesh), layer=layer)


MODEL = GPTNeoXForCausalLM
