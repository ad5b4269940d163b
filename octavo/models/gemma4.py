"""Gemma 4: layers without a window have wider heads, values may be keys, late layers read the keys of earlier ones,
each layer may receive an embedding of its own, and may have a mixture of experts beside its MLP. Source: the release of
Gemma 4 (https://ai.google.dev/gemma). Images and sounds are read by `hearing.BothReader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import KeysAndValues, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError, UnsupportedModel
from octavo.layers.elementwise import StoredFactor, addition
from octavo.layers.experts import Experts, StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.layer import CachedLayer, TensorSlot
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.routers import Router
from octavo.models.blocks import GatedMLP, SandwichLayer, stream_norm
from octavo.models.config import KINDS, read_windows
from octavo.models.decoder import DecoderStack
from octavo.models.fields import read_cap
from octavo.models.gemma_inputs import Attention, LayerInput, SharingConfig, SharingDecoder, read_sharing
from octavo.models.gemma_parts import GELU
from octavo.models.ropes import read_rope
from octavo.models.sparse import Mixture, read_mixture
from octavo.ops.experts import Routing

_EXPERTS: Final[Mapping[str, Any]] = {
    "experts": "num_experts",
    "top_k": "top_k_experts",
    "stored": StoredExperts(is_stacked=True),
    "activation": GELU,
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharingConfig):
    """`heads` are those of layers with a window; `mixture` stands beside the MLP of each layer."""

    wide_heads: Heads
    """The heads of the other layers."""
    has_values: bool
    """Whether layers without a window project values; else keys are values."""
    doubles_width: bool
    """Whether the MLPs of layers that read the keys of others are twice as wide."""

    def heads_of(self, layer: int) -> Heads:
        return self.wide_heads if self.window_of(layer) is None else self.heads

    def projects_values(self, layer: int) -> bool:
        return self.has_values or self.window_of(layer) is not None


def _read_heads(c: Checkpoint, windows: Sequence[int | None], has_values: bool) -> tuple[Heads, Heads]:
    """Return the heads of layers with and without a window. Raises UnsupportedModel or CheckpointError.

    Configs state those without one by `global_head_dim`, or layer by layer in `per_layer_config`.
    """
    query, kv = c.positive("num_attention_heads"), c.positive("num_key_value_heads")
    heads = Heads(query, kv, c.positive("head_dim", 256))
    overrides = c.section("per_layer_config")
    if overrides is None:
        own_kv = None if has_values else c.optional_positive("num_global_key_value_heads")
        wide = Heads(query, own_kv or kv, c.positive("global_head_dim", 512))
    else:
        full = [str(layer) for layer, window in enumerate(windows) if window is None]
        own = {name.lstrip("0") or "0": name for name in overrides.values}  # transformers fills numbers up with zeros
        named = [own[layer] for layer in full if layer in own]
        sections = [section for name in named if (section := overrides.section(name)) is not None]
        stated = {(each.positive("num_key_value_heads", kv), each.positive("head_dim", heads.dim)) for each in sections}
        stated = stated or {(kv, heads.dim)}
        if set(own) not in (set(), set(full)) or len(stated) != 1:
            raise UnsupportedModel(
                f"{c.origin('per_layer_config', 'layer_types')}: per_layer_config differs for other layers than those "
                f"without a window, which are {', '.join(full)}; this variant of the model is not implemented"
            )
        wide = Heads(query, *stated.pop())
    for each in (heads, wide):
        if query % each.kv:
            raise c.error("num_attention_heads", f"a multiple of the key and value heads, which are {each.kv}")
    return heads, wide


class RouterNorm(RMSNorm):
    """The norm before a router: its weight is stored under the layer's name, times the root of the width."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the weight [dim]."""
        (width,) = self.weight.shape
        yield TensorSlot(path, (width,), lambda stored: self.hold("weight", stored.float() * width**-0.5))


class SparseRouter(nn.Module):
    """The experts of each token of the stream, whose weights have a factor for each expert."""

    def __init__(self, c: Gemma4Config, mixture: Mixture) -> None:
        super().__init__()
        self.scale = RouterNorm(c.hidden_size, c.norm_eps)
        self.proj = Router(c.hidden_size, mixture.experts, mixture.rule, factors="per_expert_scale")

    def forward(self, x: Tensor) -> Routing:
        """x [tokens, hidden] → routing."""
        return self.proj(self.scale(x))


class Layer(SandwichLayer):
    """A layer that returns the whole stream, and hands on the embeddings of all layers beside it."""

    def __init__(self, c: Gemma4Config, mesh: Mesh, index: int) -> None:
        is_wide = c.doubles_width and c.writer_of(index) is not None
        width = c.intermediate_size * (2 if is_wide else 1)
        super().__init__(c, Attention(c, mesh, index), GatedMLP(replace(c, intermediate_size=width), mesh))
        self.add = addition()
        self.layer_scalar = StoredFactor(c.hidden_size)
        self.router = None
        if c.mixture is not None:
            m = c.mixture
            self.router = SparseRouter(c, m)
            self.experts = Experts(c.hidden_size, m.width, m.experts, mesh, stored=m.stored, activation=m.activation)
            self.pre_feedforward_layernorm_2 = stream_norm(c)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = stream_norm(c), stream_norm(c)
        self.layer_input = LayerInput(c, mesh, index) if c.input_size else None

    def forward(  # type: ignore[override]
        self, x: Tensor, inputs: Tensor | None, batch: ModelInput
    ) -> tuple[Tensor, Tensor | None]:
        """x [tokens, hidden], inputs [tokens, layers · input_size] → (the stream, inputs)."""
        change, stream = super().forward(x, None, batch)
        x = self.add(stream, change)
        if self.layer_input is not None:
            x = self.add(x, self.layer_input(x, inputs))
        return self.layer_scalar(x), inputs

    def feed_forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """x [tokens, hidden], the normalised stream, → [tokens, hidden]; the experts have a norm of their own."""
        dense = super().feed_forward(x, stream)
        if self.router is None:
            return dense
        sparse = self.experts(self.pre_feedforward_layernorm_2(stream), self.router(stream))
        normed = self.post_feedforward_layernorm_1(dense), self.post_feedforward_layernorm_2(sparse)
        return self.add(*normed)


def _read_layers(c: Checkpoint) -> tuple[int | None, ...]:
    """Return the window of each layer: the last layer sees all tokens, even if the config says otherwise."""
    windows = read_windows(c, is_windowed=True) or (None,) * c.positive("num_hidden_layers")
    return (*windows[:-1], None)


def _read_fields(c: Checkpoint, windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return the fields of a config, but those of sharing."""
    c.expect("hidden_activation", GELU)
    has_values = not c.bool("attention_k_eq_v", False)
    heads, wide = _read_heads(c, windows, has_values)
    ropes = {kind: read_rope(c, dim, kind=kind) for kind, dim in zip(KINDS, (wide.dim, heads.dim), strict=True)}
    return {
        "head_dim": heads.dim,
        "heads": heads,
        "norm": RMSNorm,
        "windows": windows,
        "rope": ropes[KINDS[0]],
        "ropes": tuple(ropes[KINDS[window is not None]] for window in windows),
        "attention_scale": 1.0,
        "logit_soft_cap": read_cap(c, "final_logit_softcapping", None),
        "wide_heads": wide,
        "has_values": has_values,
        "has_whole_spans": c.values.get("use_bidirectional_attention") == "vision",
        "doubles_width": c.bool("use_double_wide_mlp", False),
        "mixture": read_mixture(c, **_EXPERTS) if c.bool("enable_moe_block", False) else None,
    }


class Gemma4ForCausalLM(SharingDecoder):
    """The whole model."""

    @classmethod
    def read(cls, c: Checkpoint) -> Gemma4Config:
        windows = _read_layers(c)
        sharing = read_sharing(c, windows, 0)
        if sharing["input_size"] and sharing["input_vocab_size"] < c.positive("vocab_size"):
            raise c.error("vocab_size_per_layer_input", f"at least vocab_size, which is {c.positive('vocab_size')}")
        return Gemma4Config.gemma(c, **_read_fields(c, windows), **sharing)

    def __init__(self, c: Gemma4Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Layer(c, mesh, index))


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(Gemma4Config):
    """output_size: width of the vectors of tokens."""

    output_size: int


class EmbeddingGemma2Model(SharingDecoder):
    """EmbeddingGemma 2, whose tokens see those behind them, and become vectors of another width. The embeddings of its
    layers are projections of those of tokens."""

    RENAMED = {
        **SharingDecoder.RENAMED,
        "layer_input": "ple_block",
        "per_layer_model_projection": "ple.per_layer_model_projection",
        "per_layer_projection_norm": "ple.per_layer_projection_norm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> EmbeddingConfig:
        windows = tuple(None if each is None else each + 1 for each in _read_layers(c))  # the distance to either side
        own = _read_fields(c, windows)
        if c.section("per_layer_config") is None:
            wide = Heads(own["heads"].query, c.positive("num_global_key_value_heads", 1), own["wide_heads"].dim)
            own["wide_heads"] = wide
        return EmbeddingConfig.gemma(
            c,
            **own,
            is_bidirectional=True,
            has_head=False,
            num_sharing=0,
            input_size=c.positive("hidden_size_per_layer_input", 512),
            input_vocab_size=0,
            padding_id=0,
            output_size=c.positive("embedding_dim", 768),
        )

    def __init__(self, c: EmbeddingConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Layer(c, mesh, index))
        self.embedding_projection = ColumnLinear(c.hidden_size, c.output_size, Mesh.single())

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the vectors of tokens, [tokens, output_size]."""
        return self.embedding_projection(super().normalize(x, residual))


Gemma4UnifiedForCausalLM = Gemma4ForCausalLM
"""Gemma 4 12B, in which few products make vectors of the pixels of an image, and of the samples of a sound."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(Gemma4Config):
    """Its layers read the model's keys and values."""

    target_size: int
    """Width of the model's states."""

    def writer_of(self, layer: int) -> int | None:
        return layer  # the caches of the model, which `lend` finds


class Gemma4Assistant(SharingDecoder):
    """The small model that guesses for Gemma 4: it attends from the position of the last known token to the model's
    keys and values, and so keeps none. Where the vocabulary is in clusters, it computes the logits of all clusters."""

    config: AssistantConfig
    IGNORED = (*SharingDecoder.IGNORED, r"masked_embedding\..*", r"lm_head\.weight")
    most = 64

    @classmethod
    def read(cls, c: Checkpoint) -> AssistantConfig:
        windows = _read_layers(c)
        c.refuse("enable_moe_block", "use_double_wide_mlp", because="no assistant has it")
        return AssistantConfig.gemma(
            c,
            **_read_fields(c, windows),
            num_sharing=len(windows),
            input_size=0,
            input_vocab_size=0,
            padding_id=0,
            target_size=c.positive("backbone_hidden_size"),
        )

    def __init__(self, c: AssistantConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Layer(c, mesh, index))
        self.pre_projection = ColumnLinear(2 * c.target_size, c.hidden_size, mesh)
        self.post_projection = ColumnLinear(c.hidden_size, c.target_size, mesh)
        self._lent: tuple[Gemma4ForCausalLM] | None = None

    @property
    def received_size(self) -> int | None:
        return self.config.target_size

    def _share_cache(self, layer: int, module: CachedLayer) -> None:
        """Do nothing: the caches are those of the model, which lends them."""

    def lend(self, model: DecoderStack) -> None:
        """Use the embedding of the loaded model, and the caches of its last layers of each kind.

        Raises ConfigError where they do not fit.
        """
        if not isinstance(model, Gemma4ForCausalLM):
            raise ConfigError(
                f"speculative_config: an assistant of Gemma 4 guesses for Gemma 4 alone, and not for "
                f"{type(model).__name__}; take another model, or another method"
            )
        c, theirs = self.config, model.config
        assert isinstance(theirs, Gemma4Config)
        self._lent = (model,)  # no part of this module
        for name, layer in self.layers.items():
            window, heads = c.window_of(int(name)), c.heads_of(int(name))
            kept = LayerCache(KeysAndValues(heads.kv, heads.dim), window)
            alike = [each for each in range(theirs.num_layers) if kept in theirs.caches_of(each, Mesh.single())]
            if not alike:
                raise ConfigError(
                    f"speculative_config: layer {name} of the assistant reads {heads.kv} heads of {heads.dim} with the "
                    f"window {window}, and no layer of the model keeps these; take the assistant of this model"
                )
            (reader,) = (each for each in layer.modules() if isinstance(each, CachedLayer))
            writer = next(each for each in model.layers[str(alike[-1])].modules() if isinstance(each, CachedLayer))
            reader.cache_index, reader.cache_group = writer.cache_index, writer.cache_group

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the normalised stream [rows, hidden] of tokens whose states are received, at the positions given."""
        assert batch.received is not None, "an assistant reads hidden states"
        states = batch.received.hidden
        if self._lent is None:  # a dry run, without the caches of the model
            return torch.empty((len(states), self.config.hidden_size), dtype=states.dtype, device="meta")
        (model,) = self._lent
        assert model.embed_tokens is not None
        embedded = model.embed(model.embed_tokens(batch.token_ids), batch)
        x, inputs = self.pre_projection(torch.cat((embedded, states), 1)), None
        for layer in self.layers.values():
            x, inputs = layer(x, inputs, batch)
        return self.normalize(x, None)

    def logits(self, stage: int, features: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] of a stream [rows, hidden]."""
        return self.compute_logits(features)

    def carried(self, features: Tensor, states: Tensor) -> Tensor:
        """Return the states that the next guess reads in the place of the model's, [rows, target_size]."""
        return self.post_projection(features)
