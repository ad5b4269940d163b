"""Layers behind the last one that predict the token after the next one (MTP), and the ways in which families store
them.

A prediction layer reads the embedding of the next token and the model's last hidden state, each behind a norm, and is a
layer of the family in all else. Source: https://arxiv.org/abs/2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import UnsupportedModel
from octavo.layers.elementwise import addition
from octavo.layers.embedding import LMHead
from octavo.layers.linear import ColumnLinear
from octavo.models.blocks import GatedLayer, stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.draft_heads import Borrower
from octavo.models.hybrid import ATTENTION, HybridConfig
from octavo.models.registry import ModelClass, resolve_model
from octavo.models.streams import StreamsConfig, StreamsDecoder
from octavo.models.weight_files import checkpoint_tensors

_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json that say how many such layers a checkpoint has."""
_OWN_HEADS: Final = (".shared_head.head.weight", ".shared_head.output.weight")


class Layout(NamedTuple):
    """How checkpoints of a family hold the layer, whose index is N.

    names: the prefixes of tensors' names there, and those here behind `layers.N.`. is_normed: whether
    the next guess reads the stream behind the last norm. has_norm: whether there is one. is_dense, is_windowed: whether
    the layer has no experts, and a window, where others have them and config.json does not say. are_states_first:
    whether states stand before embeddings in what the layer reads. reads_stream: whether states are the model's stream
    before its last norm, or its streams. has_one_stream: whether the layer has one where others have several.
    has_wide_norm: whether the norm of states is one of all streams together. pattern: the key that has a letter for
    each layer, where there are several.
    """

    names: Mapping[str, str] = MappingProxyType({})
    is_normed: bool = False
    has_norm: bool = True
    is_dense: bool = False
    is_windowed: bool = False
    are_states_first: bool = False
    reads_stream: bool = False
    has_one_stream: bool = False
    has_wide_norm: bool = False
    pattern: str | None = None


_MTP: Final = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
_QWEN: Final = Layout(_MTP, is_normed=True)
_MIMO: Final = Layout(
    {
        "model.mtp.layers.0.pre_mlp_layernorm.": "post_attention_layernorm.",
        "model.mtp.layers.0.final_layernorm.": "shared_head.norm.",
        "model.mtp.layers.0.": "",
    },
    is_dense=True,
    is_windowed=True,
    reads_stream=True,
)
_FINAL_NORM: Final = Layout({"model.layers.{}.final_layernorm.": "shared_head.norm."}, is_normed=True)
_LAYOUTS: Final[Mapping[str, Layout]] = {
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen4ExpForCausalLM": Layout(
        {
            "mtp.fc_embedding.": "e_proj.",
            "mtp.fc_hidden.": "h_proj.",
            "mtp.pre_fc_norm_embedding.": "enorm.",
            "mtp.pre_fc_norm_hidden.": "hnorm.",
            "mtp.hyper_connection_mixer.": "hyper_connection_mixer.",
            "mtp.layers.0.": "",
        },
        has_norm=False,
        reads_stream=True,
        has_wide_norm=True,
    ),
    "MellumForCausalLM": _QWEN._replace(is_windowed=True),
    "ExaoneMoeForCausalLM": Layout(_MTP, is_normed=True, is_dense=True, is_windowed=True),
    "Ernie4_5_MoeForCausalLM": Layout(
        {
            "model.mtp_linear_proj.0.": "eh_proj.",
            "model.mtp_emb_norm.0.": "enorm.",
            "model.mtp_hidden_norm.0.": "hnorm.",
            "model.mtp_block.0.": "",
        },
        has_norm=False,
        is_dense=True,
    ),
    "DeepseekV4ForCausalLM": Layout(
        {
            "mtp.0.norm.": "shared_head.norm.",
            "mtp.0.hc_head_": "hc_head.hc_",
            "mtp.0.head.": "shared_head.head.",
            "mtp.0.emb.tok_emb.": "embed_tokens.",
            "mtp.0.": "",
        },
        reads_stream=True,
    ),
    "Glm5NextForConditionalGeneration": Layout(is_normed=True, has_one_stream=True),
    "HYV3ForCausalLM": _FINAL_NORM,
    "HYV4ForCausalLM": Layout(
        {"model.mtp_layers.0.final_layernorm.": "shared_head.norm.", "model.mtp_layers.0.": ""},
        is_normed=True,
        has_one_stream=True,
    ),
    "BailingMoeV2ForCausalLM": _FINAL_NORM,
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), _MIMO),
    "Step3p5ForCausalLM": Layout(
        {
            "model.layers.{}.transformer.shared_head.output.": "shared_head.head.",
            "model.layers.{}.shared_head.output.": "shared_head.head.",
            "model.layers.{}.transformer.": "",
        },
        is_dense=True,
        is_windowed=True,
        reads_stream=True,
    ),
    "Qwen2ForCausalLM": Layout(  # MiMo's
        {
            "model.mtp_layers.0.input_proj.": "eh_proj.",
            "model.mtp_layers.0.token_layernorm.": "enorm.",
            "model.mtp_layers.0.hidden_layernorm.": "hnorm.",
            "model.mtp_layers.0.final_layernorm.": "shared_head.norm.",
            "model.mtp_layers.0.": "",
        },
        is_normed=True,
        are_states_first=True,
    ),
    "NemotronHForCausalLM": Layout(
        {"mtp.layers.1.final_layernorm.": "shared_head.norm.", "mtp.layers.0.": "", "mtp.layers.1.": "+1."},
        is_normed=True,
        pattern="mtp_hybrid_override_pattern",
    ),
}
"""The layouts by class of the family; other classes have that of DeepSeek V3."""


class PredictionLayer(Borrower):
    """Placed as the base before a family's class, it makes that class the first of the family's prediction layers.

    Its input and its result are those of a `DraftHead`: the states are the model's last hidden states.
    """

    IGNORED = (
        *DecoderStack.IGNORED,
        r".*\.embed_tokens\.weight",
        r".*\.shared_head\..*",
        r".*\.hyper_connection_mixer\.block_inject_weight\.weight",
    )
    INCOMPLETE = (
        "the checkpoint was saved without its prediction layer, with which the method mtp guesses: take one that has "
        "the layer, or another method"
    )
    layout: ClassVar[Layout]
    has_own_head: ClassVar[bool]
    """Whether logits are made by a table of the layer's own, and not by the model's."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        kinds = _kinds(c, cls)
        # this rank ignores the caches of earlier layers: it has no cache groups for them
        own: dict[str, Any] = {"num_layers": config.num_layers + len(kinds), "tied": False, "has_head": False}
        if config.sparse:
            is_dense = _stated(c, "mtp_mlp_layer_types", "dense", cls.layout.is_dense)
            experts = tuple(kind != ATTENTION for kind in kinds) if len(kinds) > 1 else (not is_dense,)
            own["sparse"] = (*config.sparse, *experts)
        windows = config.windows or (None,) * config.num_layers
        window = None
        if _stated(c, "mtp_layer_types", "sliding_attention", cls.layout.is_windowed):
            window = next((each for each in windows if each), None)
        if config.windows:
            own["windows"] = (window,) * own["num_layers"]
        if config.ropes:
            alike = [rope for rope, each in zip(config.ropes, windows, strict=True) if each == window]
            own["ropes"] = (*config.ropes, next((each for each in alike if each), None))
        if isinstance(config, HybridConfig):
            own["kinds"] = (*("elsewhere",) * config.num_layers, *kinds)
        if cls.layout.has_one_stream:
            own["layer"] = GatedLayer
        return replace(config, **{**own, **super().of_one_more_layer(c, config)})

    def __init__(self, c: DecoderConfig, mesh: Mesh, *arguments: Any, **named: Any) -> None:
        super().__init__(c, mesh, *arguments, **named)
        self.norm = self.hc_head = None
        self.add = addition()
        layer = self._layer
        layer.enorm, layer.hnorm = stream_norm(c), stream_norm(c)
        self._add_projections(c)
        layer.shared_head = nn.Module()
        if self.layout.has_norm:
            layer.shared_head.norm = stream_norm(c)
        if self.has_own_head:
            layer.shared_head.head = LMHead(c.hidden_size, c.vocab_size, Mesh.single())

    def _add_projections(self, c: DecoderConfig) -> None:
        self._layer.eh_proj = ColumnLinear(2 * c.hidden_size, c.hidden_size, Mesh.single())

    @property
    def received_size(self) -> int | None:
        return self.config.hidden_size

    @property
    def _layer(self) -> Any:
        return self.layers[str(self.layer_range.start)]

    def own_name(self, name: str) -> str:
        first = self.layer_range.start
        for there, here in self.layout.names.items():
            prefix = there.format(first)
            if name.startswith(prefix):
                index, here = (first + 1, here.removeprefix("+1.")) if here.startswith("+1.") else (first, here)
                return super().own_name(f"layers.{index}.{here}{name.removeprefix(prefix)}")
        return super().own_name(name)

    def owns(self, name: str) -> bool:
        return any(name.startswith(f"layers.{index}.") for index in self.layer_range)

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the stream behind the layer, [tokens, hidden]."""
        assert batch.received is not None
        first = self._layer
        read = first.enorm(self.embedded(batch)), first.hnorm(batch.received.hidden)
        x, residual = first.eh_proj(torch.cat(read[::-1] if self.layout.are_states_first else read, 1)), None
        for layer in self.layers.values():
            x, residual = layer(x, residual, batch)
        stream: Tensor = self.add(x, residual)
        return self._normed(stream) if self.layout.is_normed else stream

    def _normed(self, stream: Tensor) -> Tensor:
        return self._layer.shared_head.norm(stream) if self.layout.has_norm else stream

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] behind streams of this layer, [rows, hidden]."""
        hidden = hidden if self.layout.is_normed else self._normed(hidden)
        if self.has_own_head:
            return self._layer.shared_head.head(hidden)
        return self.lent_logits(hidden)


class StreamsPredictionLayer(PredictionLayer):
    """A layer that reads all streams of the model, [tokens, streams · hidden], and returns its own.

    The embedding is added to each of them, both behind a projection. Sources: DeepSeek-V4's and Qwen4-Exp's releases.
    """

    config: StreamsConfig
    make_head: Callable[[Any], nn.Module]

    def _add_projections(self, c: Any) -> None:
        layer, size = self._layer, c.hidden_size
        layer.e_proj, layer.h_proj = (ColumnLinear(size, size, Mesh.single()) for _ in range(2))
        layer.hc_head = self.make_head(c)
        self._norm_width = size
        if self.layout.has_wide_norm:
            self._norm_width = c.streams.width
            layer.hnorm = c.norm(c.streams.width, c.norm_eps)

    @property
    def received_size(self) -> int | None:
        return self.config.streams.width

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the streams behind the layer, [tokens, streams · hidden]."""
        assert batch.received is not None
        layer, streams = self._layer, self.config.streams
        normed = layer.hnorm(batch.received.hidden.reshape(-1, self._norm_width))
        states = layer.h_proj(normed.view(-1, streams.dim))
        embedded = layer.e_proj(layer.enorm(self.embedded(batch))).repeat_interleave(streams.count, 0)
        x, _ = layer(self.add(states, embedded).view(-1, streams.width), None, batch)
        return x

    def _normed(self, stream: Tensor) -> Tensor:
        return super()._normed(self._layer.hc_head(stream))


def prediction_layer(c: Checkpoint) -> tuple[ModelClass, Mesh]:
    """Return the class of a checkpoint's first prediction layer, and the mesh whose rank has that layer alone.

    Raises UnsupportedModel for a checkpoint without such a layer.
    """
    family: Any = resolve_model(c, reads_images=False)
    layout = _LAYOUTS.get(family.__name__, Layout())
    names = [tensor.name for tensor in checkpoint_tensors(c)]
    count = next((found for key in _COUNTS if (found := c.optional_int(key))), 0)
    if not count and any(name.startswith(tuple(layout.names)) for name in names):
        count = 1  # some releases do not count it
    if not count or not issubclass(family, DecoderStack):
        raise UnsupportedModel(
            f"{c.origin(*_COUNTS)}: {_COUNTS[0]} is {count}, expected at least 1: method mtp guesses with the layers "
            "that a model has for it, and this one has none; take another method"
        )
    has_own_head = any(name.endswith(_OWN_HEADS) for name in names)
    own = {"layout": layout, "has_own_head": has_own_head}
    has_streams = issubclass(family, StreamsDecoder) and not layout.has_one_stream
    base = StreamsPredictionLayer if has_streams else PredictionLayer
    made: Any = type(f"{family.__name__}Prediction", (base, family), own)
    total, num_own = made.read(c).num_layers, len(_kinds(c, made))
    # the last rank has the prediction layer alone: earlier ranks have the other layers
    return made, Mesh(pipeline=Axis(total // num_own - 1, total // num_own))


def _stated(c: Checkpoint, name: str, kind: str, default: bool) -> bool:
    """Return whether the first of a list of kinds is this one. Raises CheckpointError for a value that is no list."""
    kinds = c.values.get(name) or []
    if not isinstance(kinds, list):
        raise c.error(name, "a list of kinds of layers")
    return bool(kinds[0] == kind) if kinds else default


def _kinds(c: Checkpoint, made: Any) -> tuple[str, ...]:
    """Return the kinds of the layer, of which one family calls several a layer."""
    if made.layout.pattern is None:
        return (ATTENTION,)
    letters = str(c.values.get(made.layout.pattern) or "*E")
    if any(letter not in made.KINDS for letter in letters):
        raise c.error(made.layout.pattern, f"letters out of {', '.join(made.KINDS)}")
    return tuple(made.KINDS[letter] for letter in letters)
