"""Text from sound, which is read through an encoder's output: Whisper and its relatives.

Source of Whisper: https://arxiv.org/abs/2212.04356.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.encoder_sizes import check_encoder
from octavo.config.media.listeners import COHERE, MOONSHINE, RATE, expect_parakeet
from octavo.config.section import read_section
from octavo.core.model_shape import Encoded, KeysAndValues, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.heads import Heads
from octavo.layers.layer import Layer
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import LayerNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.models.blocks import GatedLayer, PlainMLP, RotaryAttention, stream_norm
from octavo.models.config import DecoderConfig, even_share
from octavo.models.cross_attention import EncoderAttention
from octavo.models.decoder import DecoderStack
from octavo.models.encoder import held_layers, in_one_thread, keep_in_one_thread, library_config, library_module
from octavo.models.fallback.library import fill_buffers
from octavo.models.fallback.swap import swap_encoder
from octavo.models.ropes import read_rope


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(DecoderConfig):
    """num_encoded: the number of vectors that the encoder makes; `encoder` is its class of transformers."""

    num_encoded: int
    encoder: Any

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        heads = self.heads.share(mesh)
        return (
            LayerCache(KeysAndValues(heads.kv, heads.dim)),
            LayerCache(Encoded(heads.kv, heads.dim, self.num_encoded)),
        )


class WhisperLayer(GatedLayer):
    """Attention to the tokens so far, attention to the encoder's output, and MLP, each behind a norm."""

    def __init__(self, c: WhisperConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(c, RotaryAttention(c, mesh, layer), (c.mlp or PlainMLP)(c, mesh))
        self.encoder_attn_layer_norm = stream_norm(c)
        self.encoder_attn = EncoderAttention(c, mesh)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.encoder_attn_layer_norm.add(self.self_attn(x, batch), residual)
        self.encoder_attn.store(batch)
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
        super().__init__(c, mesh, lambda index: WhisperLayer(c, mesh, index), norm=c.norm)
        self.encoder = library_module(
            lambda library: c.encoder._from_config(library, attn_implementation="sdpa"), c.library
        )
        swap_encoder(self.encoder)
        self._lacks_buffers = True
        self.encoder_layers = dict(held_layers(self.encoder, "encoder"))

    def fill(self, device: torch.device) -> None:
        """Compute the buffers of the encoder that no checkpoint has, the first time."""
        if self._lacks_buffers:
            fill_buffers(self.encoder, device)
            self._lacks_buffers = False

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, whose `input_features` are [mel bands, frames]."""
        features = arrays["input_features"].to(self.encoder.get_parameter("conv1.weight").dtype)
        return self.encoder(features[None]).last_hidden_state[0]

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        yield from (each for each in super().layers_by_path() if not each[0].startswith("encoder."))
        yield from self.encoder_layers.items()


class _LateGatedMLP(nn.Module):
    """`down(up(x) * silu(gate(x)))`; one tensor stores up and, behind it, gate."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        width = c.intermediate_size
        start, length = mesh.share(width)
        halves = [Pick("fc1", 2 * width, [slice(first + start, first + start + length)]) for first in (width, 0)]
        self.gate_up_proj = PickedLinear(c.hidden_size, halves, bias=True, gated=True)
        self.fc2 = joined_linear(width, c.hidden_size, mesh, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.fc2(self.gate_up_proj(x))


class MoonshineForConditionalGeneration(WhisperForConditionalGeneration):
    """Moonshine: reads samples, and turns heads instead of learning positions.

    Source: https://arxiv.org/abs/2410.15608.
    """

    RENAMED = {
        "lm_head": "proj_out",
        "encoder_attn_layer_norm": "post_attention_layernorm",
        "post_attention_layernorm": "final_layernorm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> WhisperConfig:
        library = library_config(c, "MoonshineConfig")
        c.expect("decoder_hidden_act", "silu")
        hidden_size, num_heads = c.positive("hidden_size"), c.positive("decoder_num_attention_heads")
        for name in ("decoder_num_key_value_heads", "encoder_num_attention_heads", "encoder_num_key_value_heads"):
            c.expect(name, num_heads, default=num_heads)  # transformers' class counts all by the last
        dim = even_share(c, "hidden_size", hidden_size, num_heads)
        bias = c.bool("attention_bias", False)
        return WhisperConfig(
            num_layers=c.positive("decoder_num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=c.positive("intermediate_size"),
            heads=Heads(num_heads, num_heads, dim),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm=partial(LayerNorm, bias=False),
            norm_eps=1e-5,
            tied=c.bool("tie_word_embeddings", True),
            rope=read_rope(c, dim, share=0.9, interleaved=True),
            qkv_bias=bias,
            mlp=_LateGatedMLP,
            num_encoded=MOONSHINE.most_vectors,
            library=library,
            encoder=import_module("transformers.models.moonshine.modeling_moonshine").MoonshineEncoder,
        )

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, whose `input_values` are [samples]."""
        samples = arrays["input_values"]
        self.fill(samples.device)
        return self.encoder(samples[None].to(self.encoder.get_parameter("conv1.weight").dtype)).last_hidden_state[0]


@dataclass(frozen=True, kw_only=True)
class CohereAsrConfig(WhisperConfig):
    """extract: makes the spectrogram of samples, as transformers' class does."""

    extract: Any


class CohereAsrForConditionalGeneration(WhisperForConditionalGeneration):
    """Cohere Transcribe: reads samples, by a Conformer whose vectors are projected to the width of the text model.

    Source: Cohere's releases.
    """

    IGNORED = (*DecoderStack.IGNORED, r".*\.num_batches_tracked", r"(?:model\.)?preprocessor\.featurizer\..*")
    RENAMED = {
        **MoonshineForConditionalGeneration.RENAMED,
        "embed_norm": "embedding_layernorm",
        "embed_positions": "pos_emb",
        "encoder_proj": "proj",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }
    config: CohereAsrConfig

    @classmethod
    def read(cls, c: Checkpoint) -> CohereAsrConfig:
        section = c.stored.part("encoder_config")
        check_encoder(section)
        expect_parakeet(section)
        library = library_config(c, "CohereAsrConfig")
        hidden_size, num_heads = c.positive("hidden_size"), c.positive("num_attention_heads")
        c.expect("num_key_value_heads", num_heads, default=num_heads)
        dim = c.optional_positive("head_dim") or even_share(c, "hidden_size", hidden_size, num_heads)
        bias = c.bool("attention_bias", True)
        return CohereAsrConfig(
            num_layers=c.positive("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=c.positive("intermediate_size"),
            heads=Heads(num_heads, num_heads, dim),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm=LayerNorm,
            norm_eps=1e-5,
            embedding_norm=LayerNorm,
            position_offset=0,
            tied=c.bool("tie_word_embeddings", False),
            head_bias=True,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="relu"),
            num_encoded=COHERE.most_vectors,
            library=library.encoder_config,
            encoder=import_module("transformers.models.parakeet.modeling_parakeet").ParakeetEncoder,
            extract=_extractor(c, library.encoder_config.num_mel_bins),
        )

    def __init__(self, c: CohereAsrConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.encoder_proj = ColumnLinear(c.library.hidden_size, c.hidden_size, Mesh.single(), bias=True)
        keep_in_one_thread(self.encoder)

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [vectors, hidden] of one sound, whose `input_values` are [samples]."""
        samples = arrays["input_values"]
        self.fill(samples.device)
        made = in_one_thread(self.config.extract)(samples.float().cpu(), sampling_rate=RATE)
        mask = made["attention_mask"].to(samples.device)
        features = made["input_features"].to(samples.device, self.encoder.dtype)
        states = self.encoder(features, attention_mask=mask).last_hidden_state[0]
        return self.encoder_proj(states[: COHERE.num_vectors(len(samples))])

    def own_name(self, name: str) -> str:
        for step in _renamings():
            name = step.rename_source_key(name)[0]
        return super().own_name(name)


@cache
def _renamings() -> Sequence[Any]:
    """Return transformers' steps from the names of Cohere's release to those of its class."""
    find: Any = import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping
    return find("cohere_asr") or ()


def _extractor(c: Checkpoint, num_bands: int) -> Any:
    """Return transformers' feature extractor of a checkpoint. Raises CheckpointError."""
    module = import_module("transformers.models.cohere_asr.feature_extraction_cohere_asr")
    settings = read_section(c.path / "preprocessor_config.json", may_lack=True)
    settings.expect_all(n_fft=512, win_length=400, hop_length=160)
    settings.expect("feature_size", num_bands, default=num_bands)
    stated = {name: settings.float(name) for name in ("preemphasis", "dither") if name in settings.values}
    return module.CohereAsrFeatureExtractor(feature_size=num_bands, **stated)
