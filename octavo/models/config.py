"""The numbers of a decoder, read from its `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import msgspec
from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.config.pooling.pooling_config import sees_both
from octavo.config.section import shown
from octavo.core.model_shape import CacheGroup, KeysAndValues, LayerCache, ModelShape, group_layers
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.attention import ALL_AHEAD
from octavo.layers.heads import Heads
from octavo.layers.norm import Norm, RMSNorm
from octavo.layers.rope import LongScaling, Rope
from octavo.models.ropes import read_rope
from octavo.models.sparse import Mixture

NormPair = tuple[Norm, Norm]
"""The norms of queries and keys."""
LayerClass = Callable[[Any, nn.Module, nn.Module], nn.Module]
"""Makes a decoder layer from its config, its attention and its MLP."""
Mixer = Callable[[Any, Mesh, int], nn.Module]
"""Makes the module that mixes tokens in a layer, from the config, the mesh and the layer's number."""
KINDS: Final = ("full_attention", "sliding_attention")
"""Kinds of layers in `layer_types`: those that see all tokens, and those with a window."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The numbers that every decoder has. A model with more of them derives its own class."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: Heads
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    """The head shares the token embedding's table."""
    rope: Rope | None = None
    """The rotation of layers that see all tokens; None where there is none."""
    ropes: tuple[Rope | None, ...] = ()
    """For each layer its rotation, None for a layer without; () where all layers have `rope`."""
    qk_norms: Callable[[Any, Mesh], NormPair] | None = None
    """Makes norms of queries and keys, before they turn, from the config (`blocks.head_norms` and others)."""
    are_norms_last: bool = False
    """Whether queries and keys are normalised after they turn."""
    attention_scale: float | None = None
    """The factor of scores; None for one over the root of the head size."""
    attention_gate: str | None = None
    """The stored tensor of gates of the result of attention; `q_proj` where each head of queries has its gate behind
    it."""
    has_head_gates: bool = False
    """There is one gate for each head."""
    gate_operator: str = "gated_by_sigmoid"
    """The operator that multiplies with gates."""
    attention_soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)`."""
    is_bidirectional: bool = False
    """Whether queries see as many tokens behind themselves as before; then prompts are computed whole."""
    has_whole_spans: bool = False
    """Whether tokens of an image see all of it."""
    has_image_experts: bool = False
    """Whether layers receive the information which tokens are of images (`ModelInput.kinds`)."""
    has_whole_prompts: bool = False
    """Whether tokens of a prompt see all of it, so that caches keep what a window hides from those behind it."""
    slopes: tuple[float, ...] = ()
    """For each head the number that a score loses per token of distance (ALiBi); () where it loses nothing."""
    has_sinks: bool = False
    """Whether each head has a stored score that takes part in the softmax and has no value."""
    attention: Mixer | None = None
    """Makes attention: `blocks.RotaryAttention` unless given."""
    position_offset: int | None = None
    """The row of the first position in the table of learned positions; None where there is no table."""
    embedding_multiplier: float = 1.0
    """The factor of token embeddings."""
    embedding_norm: Callable[[int, float], Norm] | None = None
    """Makes the norm of embeddings, from width and eps; None where they have none."""
    logit_multiplier: float = 1.0
    logit_soft_cap: float | None = None
    """Logits become `cap * tanh(logit / cap)`."""
    has_head: bool = True
    """Whether there are logits."""
    head_bias: bool = False
    """Whether the head has a bias."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Whether the projection after attention has a bias."""
    mlp_bias: bool = False
    activation: str = "silu"
    activation_numbers: tuple[float, ...] = ()
    """The parameters of the activation (`layers.linear.GatedLinear`); () for one without."""
    norm: Callable[[int, float], Norm] = RMSNorm
    """Makes a norm of the stream: (width, eps)."""
    is_transposed: bool = False
    """Whether weights are stored [inputs, outputs]."""
    qkv_reads: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The stored tensors of queries, keys and values: one for each, or one that holds all (QKVLinear)."""
    renamed: Mapping[str, str] | None = None
    """Names of modules in the place of the class's `RENAMED`, where they follow from the config."""
    library: Any = None
    """transformers' config of the whole model, whose encoders are made with it; None for a model of text alone."""
    qkv_unbiased: tuple[str, ...] = ()
    """The tensors of queries, keys and values that have no bias although `qkv_bias` is set."""
    qkv_shards: int = 0
    """With `is_qkv_grouped`: the number of parts of one tensor, each with queries, values and keys; 0 where it is
    grouped by head."""
    is_qkv_grouped: bool = False
    """Whether one stored tensor has queries, key and value of the first head of keys, then those of the next; with two
    tensors in `qkv_reads`, whether the second has key and value of the first head, then those of the next."""
    qkv_limit: float | None = None
    """Queries, keys and values are clamped to this number on either side."""
    gate_up_reads: tuple[str, ...] = ("gate_proj", "up_proj")
    """The stored tensors of a gated MLP: one for each half, or one that holds both."""
    windows: tuple[int | None, ...] = ()
    """For each layer the tokens that a query sees, itself included, or None for all; () where all layers see all."""
    layer: LayerClass | None = None
    """Makes the layer that joins attention and MLP: `blocks.GatedLayer` unless given."""
    mlp: Callable[[Any, Mesh], nn.Module] | None = None
    """Makes the MLP of a layer from the config: `blocks.GatedMLP` unless given."""
    mixture: Mixture | None = None
    """The experts of layers that have them instead."""
    sparse: tuple[bool, ...] = ()
    """For each layer whether it has experts; () where all have, if there are any."""

    @classmethod
    def common(
        cls,
        c: Checkpoint,
        *,
        head_dim: int | None = None,
        rotary_share: float | None = None,
        interleaved: bool = False,
        bias: bool = False,
        turns_all: bool = True,
        **own: Any,
    ) -> Self:
        """Read the keys that Llama and its descendants share; `own` adds or replaces fields.

        `head_dim` defaults to the config's key, else to an even share of the hidden size. `rotary_share` and
        `interleaved` are those of `read_rope`. `bias`: of all projections of attention. turns_all: False leaves heads
        as they are in layers that see all tokens.
        """
        if "activation" not in own:
            c.expect("hidden_act", "silu")
        kinds = c.values.get("layer_types") or []
        if "windows" not in own and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
            raise UnsupportedModel(
                f"{c.origin('layer_types')}: layer_types has {shown(kinds)}, expected full_attention alone"
            )
        if "windows" not in own and c.has_ropes_by_kind():
            raise UnsupportedModel(
                f"{c.origin('rope_parameters')}: rope_parameters differ by kind of layer, expected those of all layers"
            )
        hidden_size, num_heads = c.positive("hidden_size"), c.positive("num_attention_heads")
        num_kv_heads = c.divisor("num_key_value_heads", "num_attention_heads", num_heads, num_heads)
        dim = head_dim or c.optional_positive("head_dim") or even_share(c, "hidden_size", hidden_size, num_heads)
        fields: dict[str, Any] = {
            "num_layers": own.get("num_layers") or c.positive("num_hidden_layers"),
            "hidden_size": hidden_size,
            "intermediate_size": own.get("intermediate_size") or c.positive("intermediate_size"),
            "heads": Heads(num_heads, num_kv_heads, dim),
            "vocab_size": c.positive("vocab_size"),
            "max_positions": c.max_model_len(),
            "norm_eps": c.positive_float("rms_norm_eps", 1e-6),
            "tied": c.bool("tie_word_embeddings", False),
            "qkv_bias": bias,
            "out_bias": bias,
            "is_bidirectional": sees_both(c),
        }
        if "rope" not in own:
            read = partial(read_rope, c, dim, share=rotary_share, interleaved=interleaved)
            fields["rope"] = read()
            if c.has_ropes_by_kind():
                kinds = [KINDS[window is not None] for window in own.get("windows", ())]
                ropes = {kind: read(kind=kind) for kind in kinds}
                fields["ropes"] = tuple(ropes[kind] for kind in kinds)
        made = cls(**{**fields, **own})
        if turns_all:
            return made
        windows = made.windows or (None,) * made.num_layers
        return replace(made, ropes=tuple(None if window is None else made.rope for window in windows))

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        return self.heads

    def mixer_of(self, layer: int) -> Mixer | None:
        """Return the function that makes a layer's attention, or the module in its place."""
        return self.attention

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        """Return the caches that a rank of `mesh` has of a layer, in the order of its cached modules."""
        heads = self.heads_of(layer).share(mesh)
        window = None if self.has_whole_prompts else self.window_of(layer)
        return (LayerCache(KeysAndValues(heads.kv, heads.dim), window),)

    def shape(self, mesh: Mesh | None = None) -> ModelShape:
        """Return the sizes that memory arithmetic needs: of the part of a rank of `mesh`, else of the whole model."""
        single = Mesh.single()
        caches = [self.caches_of(layer, single) for layer in range(self.num_layers)]
        groups = group_layers(caches)
        heads, layers = self.heads, range(self.num_layers)
        if mesh is not None:
            heads, layers = heads.share(mesh), mesh.layer_range(self.num_layers)
            groups = tuple(self._of_rank(group, caches[group.layers[0]], mesh).of_range(layers) for group in groups)
        return ModelShape(
            num_layers=len(layers),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=heads.query,
            num_kv_heads=heads.kv,
            head_dim=heads.dim,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_positions,
            cache_groups=groups,
        )

    def _of_rank(self, group: CacheGroup, caches: Sequence[LayerCache], mesh: Mesh) -> CacheGroup:
        """Return a group with the rank's share of its cache. caches: those of the group's first layer in the whole
        model."""
        place = caches.index(LayerCache(group.keeps, group.window))
        return msgspec.structs.replace(group, keeps=self.caches_of(group.layers[0], mesh)[place].keeps)

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation of a layer, None where it has none."""
        return self.ropes[layer] if self.ropes else self.rope

    def all_ropes(self) -> set[Rope]:
        """Return the rotations of all layers, each once."""
        return {rope for rope in self.ropes or (self.rope,) if rope is not None}

    def position_bytes(self) -> int:
        """Return the bytes that tables with a row for each position take per position."""
        return sum(rope.table_bytes(1) for rope in self.all_ropes())

    def rope_note(self, max_model_len: int) -> str:
        """Return how positions follow from the longest sequence that is served; empty where they do not."""
        notes = {each.scaling.note(max_model_len) for each in self.all_ropes() if isinstance(each.scaling, LongScaling)}
        return "; ".join(sorted(notes))

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a query sees in a layer, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    def ahead_of(self, layer: int) -> int:
        """Return how many tokens behind itself a query sees in a layer."""
        if not self.is_bidirectional:
            return 0
        window = self.window_of(layer)
        return ALL_AHEAD if window is None else window - 1


def read_windows(
    c: Checkpoint, *, is_windowed: bool, default: int | None = None, pattern: int | None = None
) -> tuple[int | None, ...]:
    """Return the window of each layer, () where none has one.

    `layer_types` says which layers have the window `sliding_window`, as do `sliding_window_pattern` (all but every
    n-th; `pattern` where it is absent) and `max_window_layers` (all from the n-th on). Without these all layers have it
    where `is_windowed`. `default` is the window where the config names none.
    """
    num_layers = c.positive("num_hidden_layers")
    kinds = c.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind not in KINDS for kind in kinds) or len(kinds) != num_layers:
            raise UnsupportedModel(
                f"{c.origin('layer_types', 'num_hidden_layers')}: layer_types has {shown(kinds)}, expected "
                f"{' or '.join(KINDS)} for each of {num_layers} layers"
            )
        has_window = [kind == "sliding_attention" for kind in kinds]
    elif not is_windowed:
        return ()
    elif pattern is not None or c.values.get("sliding_window_pattern") is not None:
        pattern = c.positive("sliding_window_pattern", 1 if pattern is None else pattern)
        has_window = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        first = c.values.get("max_window_layers")
        first = 0 if first is None else c.int("max_window_layers")
        has_window = [layer >= first for layer in range(num_layers)]
    if not any(has_window):
        return ()
    window = c.positive("sliding_window") if default is None else c.positive("sliding_window", default)
    return tuple(window if each else None for each in has_window)


def windows_by_kind(c: Checkpoint, default: int | None = None) -> tuple[int | None, ...]:
    """Return the window of each layer, as `layer_types` says, which has to be there. Raises CheckpointError."""
    if c.values.get("layer_types") is None:
        raise c.error("layer_types", "the kind of each layer")
    return read_windows(c, is_windowed=False, default=default)


def even_share(c: Checkpoint, name: str, size: int, num_heads: int) -> int:
    """Return the head size where the heads share `size`, the value of `name`, evenly."""
    if size % num_heads:
        raise c.error(name, f"a multiple of the number of heads, which is {num_heads}")
    return size // num_heads
