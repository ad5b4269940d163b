"""Whisper: text from sound, which is read through an encoder's output. Source: https://arxiv.org/abs/2212.04356."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Encoded, KeysAndValues, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import CrossAttention
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.heads import Heads
from octavo.layers.layer import Layer
from octavo.layers.linear import HeadsLinear, joined_linear
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedLayer, PlainMLP, RotaryAttention, stream_norm
from octavo.models.config import DecoderConfig, even_share
from octavo.models.decoder import DecoderStack
from octavo.models.encoder import held_layers, library_config, library_module
from octavo.models.fallback.swap import swap_encoder


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(DecoderConfig):
    """num_encoded: vectors that the encoder makes, whose class of transformers is `encoder`."""

    num_encoded: int
    encoder: Any

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        heads = self.heads.share(mesh)
        return (
            LayerCache(KeysAndValues(heads.kv, heads.dim)),
            LayerCache(Encoded(heads.kv, heads.dim, self.num_encoded)),
        )


class EncoderAttention(nn.Module):
    """Attention to the encoder's output, without positions."""

    def __init__(self, c: WhisperConfig, mesh: Mesh) -> None:
        super().__init__()
        self.query = HeadsLinear(c.hidden_size, c.heads, mesh, reads=("q_proj",), bias=True)
        self.key_value = HeadsLinear(
            c.hidden_size, c.heads, mesh, reads=("k_proj", "v_proj"), bias=True, unbiased=("k_proj",)
        )
        self.attention = CrossAttention(self.query.local_heads)
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh, bias=True)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        for each in batch.encoded:  # one by one: the bits of one do not depend on others
            with batch.products_of(each):
                k, v = self.key_value(each.states)
            self.attention.store(k, v, each.written, batch)
        (q,) = self.query(x)
        return self.o_proj(self.attention.attend(q, batch))


class WhisperLayer(GatedLayer):
    """Attention to the tokens so far, attention to the encoder's output, and MLP, each behind a norm."""

    def __init__(self, c: WhisperConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(c, RotaryAttention(c, mesh, layer), PlainMLP(c, mesh))
        self.encoder_attn_layer_norm = stream_norm(c)
        self.encoder_attn = EncoderAttention(c, mesh)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.encoder_attn_layer_norm.add(self.self_attn(x, batch), residual)
        x, residual = self.post_attention_layernorm.add(self.encoder_attn(x, batch), residual)
        return self.mlp(x), residual


class WhisperForConditionalGeneration(DecoderStack):
    """The whole model. Each rank has the whole encoder."""

    PREFIXES = ("model.decoder.", "decoder.", "model.")
    RENAMED = {
        "norm": "layer_norm",
        "lm_head": "proj_out",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "o_proj": "out_proj",
        "mlp": "",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }
    config: WhisperConfig

    @classmethod
    def read(cls, c: Checkpoint) -> WhisperConfig:
        library = library_config(c, "WhisperConfig")
        hidden_size, num_heads = c.positive("d_model"), c.positive("decoder_attention_heads")
        for name in ("encoder_layers", "encoder_ffn_dim", "num_mel_bins"):
            c.positive(name)
        even_share(c, "d_model", hidden_size, c.positive("encoder_attention_heads"))
        return WhisperConfig(
            num_layers=c.positive("decoder_layers"),
            hidden_size=hidden_size,
            intermediate_size=c.positive("decoder_ffn_dim"),
            heads=Heads(num_heads, num_heads, even_share(c, "d_model", hidden_size, num_heads)),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm=LayerNorm,
            norm_eps=1e-5,
            position_offset=0,
            tied=c.bool("tie_word_embeddings", True),
            qkv_bias=True,
            qkv_unbiased=("k_proj",),
            out_bias=True,
            mlp_bias=True,
            activation=c.expect("activation_function", *OPERATOR_OF, default="gelu"),
            num_encoded=c.positive("max_source_positions"),
            library=library,
            # here, because what a module makes while it is imported is not for the meta device
            encoder=import_module("transformers.models.whisper.modeling_whisper").WhisperEncoder,
        )

    def __init__(self, c: WhisperConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: WhisperLayer(c, mesh, index), norm=LayerNorm)
        self.encoder = library_module(
            lambda library: c.encoder._from_config(library, attn_implementation="sdpa"), c.library
        )
        swap_encoder(self.encoder)
        self.encoder_layers = dict(held_layers(self.encoder, "encoder"))

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, whose `input_features` are [mel bands, frames]."""
        features = arrays["input_features"].to(self.encoder.get_parameter("conv1.weight").dtype)
        return self.encoder(features[None]).last_hidden_state[0]

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        yield from (each for each in super().layers_by_path() if not each[0].startswith("encoder."))
        yield from self.encoder_layers.items()
