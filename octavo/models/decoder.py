"""The decoder that every model is: embedding → layers → norm → head, or the part of it that one pipeline stage has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.attention.metadata import IntermediateTensors, ModelInput, NotedStates
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, ConfigError, one_line
from octavo.layers.elementwise import Elementwise, addition
from octavo.layers.embedding import Embedding, embedding_and_head
from octavo.layers.layer import CachedLayer, Layer
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import Norm, RMSNorm
from octavo.models.config import DecoderConfig
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import Ops

_STORED: Final = {"lm_head": "lm_head", "value": "v_head"}
"""Names of heads of labels where they are stored under others."""
_CLASSIFIERS: Final = {"dense": "score.2.", "token": "score."}
"""The layer of labels that families may store as `classifier`, by the head."""
PROOF_BLOCK_SIZE: Final = 16
"""Tokens per block of the caches of a proof."""
LAYER_NUMBER: Final = re.compile("[0-9]{1,9}")
"""The digits of a layer's number, all of which `int` accepts: it refuses thousands of digits, and some of Unicode's."""


class DecoderStack(nn.Module):
    """The layers that this rank has of the decoder. The first stage also embeds, the last one has norm and head.

    `layer` makes the decoder layer of an index: a module (x, residual, batch) → (x, residual), each [tokens, hidden].
    A family that computes more between embedding and layers, or between norm and head, overrides `embed`, `normalize`
    or `compute_logits`.

    The names of its modules are the checkpoint's names, except that a checkpoint may put one of `PREFIXES` before all
    names of the decoder, and that `RENAMED` maps names of modules, wherever they are, to their names there; a module
    whose name there is empty leaves no trace. Tensors of GGUF files have the names of modules (`gguf.names`).
    `REPLACED` has parts of stored names with what stands in their place here, in the order in which they are replaced;
    `NAMES` has patterns of such parts, which come before them. Tensors that match a pattern of `IGNORED` (a regular
    expression for the whole name, without prefix) are known and not needed.
    """

    PREFIXES: ClassVar[tuple[str, ...]] = ("model.",)
    RENAMED: ClassVar[Mapping[str, str]] = {}
    REPLACED: ClassVar[Mapping[str, str]] = {}
    NAMES: ClassVar[Mapping[str, str]] = {}
    IGNORED: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq",)
    INCOMPLETE: ClassVar[str] = "the checkpoint is incomplete or its config.json belongs to another: download it again"
    """What is said of a checkpoint that lacks tensors."""
    FIRST_STAGE: ClassVar[tuple[str, ...]] = ("embed_tokens", "embed_positions", "embed_norm")
    """The modules that only the first stage has."""
    LAST_STAGE: ClassVar[tuple[str, ...]] = ("norm", "lm_head", "score")
    """The modules that only the last stage has."""

    replaces_tokens: ClassVar[bool] = False
    """Whether `encode` makes vectors that take the place of those of tokens."""
    keeps_vectors: ClassVar[bool] = False
    """Whether such vectors are the layers' input as they are, without the factor and the norm of embeddings."""

    carries_residual = True
    """Whether the layers return a residual beside x."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        """Read the config of `c`. Raises CheckpointError or UnsupportedModel."""
        raise NotImplementedError

    @classmethod
    def of_one_more_layer(cls, c: Checkpoint, config: DecoderConfig) -> Mapping[str, Any]:
        """Return fields of the family's own that `config` has for each layer, with those of a prediction layer too."""
        return {}

    def __init__(
        self,
        c: DecoderConfig,
        mesh: Mesh,
        layer: Callable[[int], nn.Module],
        *,
        norm: Callable[[int, float], Norm] = RMSNorm,
        embedding_size: int | None = None,
    ) -> None:
        """embedding_size: width of embedding and head, the layers' width unless given."""
        super().__init__()
        self.config = c
        if c.renamed is not None:
            self.__dict__["RENAMED"] = c.renamed
        self.layer_range = mesh.layer_range(c.num_layers)
        self.is_first, self.is_last = self.layer_range.start == 0, self.layer_range.stop == c.num_layers
        width = embedding_size or c.hidden_size
        tied = c.tied and c.has_head
        embed_tokens, lm_head = embedding_and_head(c.vocab_size, width, mesh, tied=tied, bias=c.head_bias)
        # a tied head multiplies by the embedding's table
        self.embed_tokens = embed_tokens if self.is_first or (self.is_last and tied) else None
        self.embed_positions = None
        if c.position_offset is not None and self.is_first:
            self.embed_positions = Embedding(c.max_positions, c.hidden_size, offset=c.position_offset)
            self.add_positions = addition()
        self.embed_norm: nn.Module | None = None
        if c.embedding_norm is not None and self.is_first:
            self.embed_norm = c.embedding_norm(c.hidden_size, c.norm_eps)
        self.layers = nn.ModuleDict({str(index): layer(index) for index in self.layer_range})
        self.norm = norm(c.hidden_size, c.norm_eps) if self.is_last else None
        self.lm_head = lm_head if self.is_last and c.has_head else None
        self.encoder_layers: Mapping[str, Layer] = {}
        """The layers of `layers_by_path` that make vectors of images or sounds."""
        self.score: nn.Module | None = None
        """Makes scores of labels, [rows, labels], of the pooled hidden states [rows, hidden]."""
        self.embedding_factor = None if c.embedding_multiplier == 1 else Elementwise("scaled", c.embedding_multiplier)
        self.logit_factor = None if c.logit_multiplier == 1 else Elementwise("scaled", c.logit_multiplier)
        self.logit_cap = None if c.logit_soft_cap is None else Elementwise("soft_capped", c.logit_soft_cap)
        self._noted_layers: tuple[int, ...] = ()
        self._assign_caches(c, mesh)

    @property
    def received_size(self) -> int | None:
        """Width of what each step receives beside tokens; None for nothing."""
        return None if self.is_first else self.config.hidden_size

    @property
    def encoding_size(self) -> int:
        """Width of the vectors that `encode` makes."""
        return self.config.hidden_size

    @property
    def sees_ahead(self) -> bool:
        """Whether tokens see those behind them in all layers."""
        cached = (layer for layer in self.modules() if isinstance(layer, CachedLayer))
        return self.config.is_bidirectional and all(layer.sees_ahead for layer in cached)

    def note_layers(self, layers: Iterable[int]) -> None:
        """Return the stream before these layers too, from now on; called before the model is loaded.

        Raises ConfigError for layers that the model does not have.
        """
        self._noted_layers, self.add_streams = tuple(layers), addition()
        if any(layer not in self.layer_range for layer in self._noted_layers):
            raise ConfigError(
                f"speculative_config: the head reads the streams before layers {self._noted_layers}, and this model "
                f"has {self.config.num_layers} layers; take a head that was made for this model"
            )

    def note_stream(self) -> None:
        """Return the stream behind the last layer too, before the norm, from now on; called before the model is
        loaded."""
        self._noted_layers, self.add_streams = (self.config.num_layers,), addition()

    def _assign_caches(self, c: DecoderConfig, mesh: Mesh) -> None:
        """Give each cached module the places of its cache and its cache group."""
        groups = c.shape(mesh).cache_groups
        # a layer's caches follow each other in the order of their groups, as the worker makes them
        places = sorted((layer, place) for place, group in enumerate(groups) for layer in group.layers)
        for number, (index, layer) in enumerate(self.layers.items()):
            modules = [each for each in layer.modules() if isinstance(each, CachedLayer)]
            own = [each for each in modules if each.shares_cache_of is None]
            for module, cache in zip(own, c.caches_of(int(index), mesh), strict=True):
                module.cache_group = next(
                    place
                    for place, group in enumerate(groups)
                    if number in group.layers and LayerCache(group.keeps, group.window) == cache
                )
                module.cache_index = places.index((number, module.cache_group))
            for module in modules:
                if module.shares_cache_of is not None:
                    self._share_cache(int(index), module)

    def _share_cache(self, layer: int, module: CachedLayer) -> None:
        """Give a module the place of another layer's cache. Raises ConfigError where another stage has that layer."""
        if module.shares_cache_of not in self.layer_range:
            raise ConfigError(
                f"pipeline_parallel_size: layer {layer} reads the keys and values of layer {module.shares_cache_of}, "
                "which another stage would have; use tensor_parallel_size"
            )
        others = self.layers[str(module.shares_cache_of)].modules()
        writer = next(each for each in others if isinstance(each, CachedLayer))
        module.cache_index, module.cache_group = writer.cache_index, writer.cache_group

    def forward(self, batch: ModelInput) -> Tensor | IntermediateTensors | NotedStates:
        """Return the normalised last hidden state of every token, [tokens, hidden]; or what the next stage receives."""
        x, residual = self.begin(batch) if batch.received is None else batch.received
        override = batch.embeddings
        if override is not None and (level := override.levels.get(-1)) is not None:
            x = x.index_add(0, override.token_indices, level)
        streams: dict[int, Tensor] = {}
        for index, layer in self.layers.items():
            if self._noted_layers and int(index) in self._noted_layers:
                streams[int(index)] = self._stream(x, residual)
            x, residual = layer(x, residual, batch)
            if override is not None and (level := override.levels.get(int(index))) is not None:
                x = x.index_add(0, override.token_indices, level)
        if self.is_last:
            if self.config.num_layers in self._noted_layers:
                streams[self.config.num_layers] = self._stream(x, residual)
            hidden = self.normalize(x, residual)
            if not self._noted_layers:
                return hidden
            return NotedStates(hidden, tuple(streams[each] for each in self._noted_layers))
        assert (residual is not None) == self.carries_residual, "the next stage receives what carries_residual states"
        return IntermediateTensors(x, residual)

    def _stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        is_whole = residual is None or not self.carries_residual
        return x if is_whole else self.add_streams(x, residual)

    def begin(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return what the first layer receives: its input [tokens, hidden], and what is carried beside it."""
        return self._embed_tokens(batch), None

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Make the first layer's input [tokens, hidden] from the token embeddings x [tokens, embedding_size]."""
        if self.embed_positions is not None:
            x = self.add_positions(x, self.embed_positions(batch.positions))
        if self.embedding_factor is not None:
            x = self.embedding_factor(x)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return batch.embeddings.put_into(x) if self.keeps_vectors and batch.embeddings is not None else x

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Make the last hidden states [tokens, hidden] from what the last layer returned."""
        assert self.norm is not None, "only the last stage has the norm"
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Multiply rows of the last stage's hidden states: [rows, hidden] → float32 logits [rows, tokens].

        The tokens are those of this rank's share of the vocabulary, a range of ids of one length on all tensor ranks;
        what the last shares have beyond the vocabulary means nothing.
        """
        assert self.lm_head is not None, "only the last stage has the head"
        logits: Tensor = self.lm_head(hidden)
        if self.logit_factor is not None:
            logits = self.logit_factor(logits)
        return logits if self.logit_cap is None else self.logit_cap(logits)

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return what an encoder makes of the arrays of one image or sound, [vectors, width]; nothing else changes it.

        Raises NotImplementedError for a model without encoders.
        """
        raise NotImplementedError

    def add_scores(self, num_labels: int, head: str = "classifier") -> None:
        """Add the module that makes scores of labels: the family's head of a classifier, or another one
        (`PoolingConfig`).

        Each tensor rank has all of it: it is small, and labels may be fewer than ranks.
        """
        size = self.config.hidden_size
        self.score = ColumnLinear(size, num_labels, Mesh(), bias=head not in ("classifier", *_STORED))
        if head in _STORED:
            self.__dict__["RENAMED"] = {**self.RENAMED, "score": _STORED[head]}
        if head in _CLASSIFIERS:
            self.__dict__["NAMES"] = {r"^dense\.": "score.0.", r"^classifier\.": _CLASSIFIERS[head], **self.NAMES}
        if head == "dense":
            self.score = nn.Sequential(ColumnLinear(size, size, Mesh(), bias=True), nn.GELU(), self.score)
        if head == "reward":
            self.score = nn.Sequential(ColumnLinear(size, size, Mesh(), bias=True), nn.ReLU(), self.score)

    def ignore(self, *patterns: str) -> None:
        """Know the tensors that match these patterns beside those of `IGNORED`."""
        self.__dict__["IGNORED"] = (*self.IGNORED, *patterns)

    def leave_out(self, prefixes: Iterable[str]) -> None:
        """Know the tensors whose names begin so as others read them."""
        self.ignore(*(rf"{re.escape(each)}\w+" for each in prefixes))

    def need_one_stage(self, why: str) -> None:
        """Raise ConfigError with the reason where other stages have layers of the model."""
        if not (self.is_first and self.is_last):
            raise ConfigError(f"pipeline_parallel_size: {why}; use tensor_parallel_size")

    def proof(self, ops: Ops, attention: Callable[[int], AttentionBackend], folder: Path | None) -> str | None:
        """Return in words what was proved of the class before it is used; None for a family, which tests prove.

        attention: makes a backend for float32 and a head size. folder: where verdicts are kept; None to keep none.
        Raises UnsupportedModel where the class does not compute what it should.
        """
        return None

    def own_name(self, name: str) -> str:
        """Return the name of a stored tensor in this class, where checkpoints have another."""
        for pattern, own in self.NAMES.items():
            name = re.sub(pattern, own, name)
        for stored, own in self.REPLACED.items():
            name = name.replace(stored, own)
        return name

    def owns(self, name: str) -> bool:
        """Return whether a tensor with this name, without prefix, belongs to this rank's part of the model.

        A tensor that does belong to it and that no layer reads is an error of the checkpoint.
        """
        part, _, rest = name.partition(".")
        if part == self.RENAMED.get("layers", "layers"):
            index = rest.partition(".")[0]
            is_number = LAYER_NUMBER.fullmatch(index) is not None
            return not is_number or int(index) in self.layer_range or int(index) >= self.config.num_layers
        elsewhere = (() if self.is_first else self.FIRST_STAGE) + (() if self.is_last else self.LAST_STAGE)
        if not self.config.has_head:
            elsewhere += ("lm_head",)
        return part not in {self.RENAMED.get(each, each) for each in elsewhere}

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        """Yield every layer with its path in the checkpoint."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield self.stored_name(path), module

    def stored_name(self, path: str) -> str:
        """Return the name in checkpoints, without prefix, of a module or a tensor with this path here."""
        top, *parts = path.split(".")
        # modules within a layer that are called like the last norm keep their names
        names = (part if part == "norm" else self.RENAMED.get(part, part) for part in parts)
        return ".".join(filter(None, (self.RENAMED.get(top, top), *names)))

    def plain_bytes(self) -> int:
        """Return the bytes of all parameters before any layer is finished."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        """Return the specs of the tensors of `state`, before the model is loaded."""
        layers = ((path, layer.state_specs(ops)) for path, layer in self.layers_by_path())
        return {f"{path}.{name}": spec for path, specs in layers for name, spec in specs.items()}

    def planned_bytes(self, ops: Ops) -> int:
        """Return the bytes that `state` will take, before the model is loaded."""
        return sum(spec.nbytes for spec in self.state_specs(ops).values())

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the loaded model keeps, by layer and name."""
        layers = ((path, layer.state()) for path, layer in self.layers_by_path())
        return {f"{path}.{name}": tensor for path, tensors in layers for name, tensor in tensors.items()}

    def restore(self, state: Mapping[str, Tensor], ops: Ops) -> None:
        """Set what `state` returned instead of loading; the tensors meet `state_specs`."""
        for path, layer in self.layers_by_path():
            layer.restore({name: state[f"{path}.{name}"] for name in layer.state_specs(ops)})

    def _embed_tokens(self, batch: ModelInput) -> Tensor:
        assert self.embed_tokens is not None, "only the first stage embeds tokens"
        x: Tensor = self.embed_tokens(batch.token_ids)
        if batch.embeddings is not None:
            x = batch.embeddings.put_into(x)
        return self.embed(x, batch)


@contextmanager
def possible_sizes(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise CheckpointError within for a tensor whose sizes are more than can be counted."""
    try:
        yield
    except RuntimeError as error:
        if "overflowed" not in str(error):
            raise
        raise CheckpointError(
            f"{checkpoint.origin()}: a tensor of the model would be larger than any memory ({one_line(error)}), "
            "expected the sizes of its weights; download it again"
        ) from error
