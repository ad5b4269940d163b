"""StarCoder2: LayerNorms and a plain GELU MLP around rotary attention. Source: https://arxiv.org/abs/2402.19173."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, PlainMLP
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Starcoder2ForCausalLM",)


class Starcoder2Config(DecoderConfig):
    """One switch for all biases; `sliding_window` null means full attention."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        bias = c.bool("use_bias", True)
        return cls.common(
            c,
            norm=LayerNorm,
            norm_eps=c.positive_float("norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu_pytorch_tanh"),
            windows=read_windows(c, is_windowed=c.values.get("sliding_window") is not None),
        )


class Starcoder2ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Starcoder2Config
    RENAMED: ClassVar[Mapping[str, str]] = {"up_proj": "c_fc", "down_proj": "c_proj"}

    def __init__(self, c: Starcoder2Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, mlp=lambda _: PlainMLP(c, mesh))


MODEL = Starcoder2ForCausalLM
