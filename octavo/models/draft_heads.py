"""Heads that guess the token after the next one from a model's hidden states: EAGLE and EAGLE-3.

A head is a decoder of one layer. At each position it reads what the model (or the head itself, behind its own guesses)
has made of the tokens up to there, and the embedding of the next token. Sources: https://arxiv.org/abs/2401.15077,
https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.elementwise import addition
from octavo.layers.embedding import Embedding
from octavo.layers.linear import ColumnLinear
from octavo.models.blocks import GatedLayer, GatedMLP, RotaryAttention, head_norms, stream_norm
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.latent import LatentBlock, LatentConfig
from octavo.models.weight_files import checkpoint_tensors

MASK_STATE: Final = "mask_hidden"
"""The tensor that a P-EAGLE head reads in the place of the model's streams where tokens are masks."""
_NOTED: Final = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DecoderConfig):
    """Adds what a head shares with its model. vocab_size: tokens that the head itself has logits of."""

    embedded_tokens: int
    """Rows of the token embedding."""
    has_embedding: bool
    """Whether the head has a token embedding of its own."""
    fc_bias: bool

    @classmethod
    def read_head(cls, c: Checkpoint, names: Collection[str], **own: Any) -> Self:
        """Read the config of a head. names: those of its tensors. Raises CheckpointError or UnsupportedModel."""
        return cls.numbers(
            c,
            mlp_bias=c.bool("mlp_bias", False),
            windows=(),
            tied=False,
            embedded_tokens=c.positive("vocab_size"),
            has_embedding="embed_tokens.weight" in names,
            fc_bias="fc.bias" in names,
            **own,
        )

    @classmethod
    def numbers(cls, c: Checkpoint, **own: Any) -> Self:
        """Read the keys that all decoders with its kind of attention share. Raises CheckpointError."""
        return cls.common(c, bias=c.bool("attention_bias", False), **own)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Adds the fields in which heads of EAGLE-3 differ."""

    target_size: int
    """Width of the model's streams."""
    noted_layers: tuple[int, ...] | None = None
    """Layers of the model; the head reads the stream before each of them. None for the usual layers."""
    has_input_norm: bool = False
    """Whether the streams side by side are normalised as one vector."""
    has_chunk_norms: bool = False
    """Whether each stream is normalised by itself."""
    is_stream_normed: bool = False
    """Whether the stream begins behind the norm of the state."""
    mask_token: int | None = None
    """The token in the place of later ones, of a head that guesses all at once (P-EAGLE); else None."""
    is_output_normed: bool = False
    """Whether a later guess reads the stream behind the last norm."""

    def attention_in(self, mesh: Mesh, layer: int) -> RotaryAttention | LatentBlock:
        """Make the attention of a layer, of which the first reads embedding and state side by side."""
        if layer:
            return RotaryAttention(self, mesh, layer)
        made = RotaryAttention(replace(self, hidden_size=2 * self.hidden_size), mesh, layer)
        made.o_proj = ColumnLinear(self.heads.q_size, self.hidden_size, mesh, bias=self.out_bias)
        return made

    @property
    def num_noted(self) -> int:
        """The number of layers whose streams the head reads."""
        return len(self.noted_layers or usual_layers(0))

    @classmethod
    def read_third(cls, c: Checkpoint) -> Self:
        """Read the config of an EAGLE-3 head. Raises CheckpointError or UnsupportedModel."""
        names, eagle = tensor_names(c), c.section("eagle_config")
        where = c if eagle is None or _NOTED not in eagle.values else eagle
        noted = where.values.get(_NOTED)
        if noted is not None and not _are_layers(noted):
            raise where.error(_NOTED, "a list of 2 layers or more")
        in_eagle = {} if eagle is None else eagle.values
        return cls.read_head(
            c,
            names,
            vocab_size=c.optional_positive("draft_vocab_size") or c.positive("vocab_size"),
            has_head="lm_head.weight" in names,
            target_size=c.optional_positive("target_hidden_size") or c.positive("hidden_size"),
            noted_layers=None if noted is None else tuple(noted),
            has_input_norm=bool(in_eagle.get("norm_before_fc", c.bool("norm_before_fc", False))),
            has_chunk_norms=c.bool("fc_norm", False),
            is_stream_normed=c.bool("norm_before_residual", False),
            is_output_normed=c.bool("norm_output", False),
            mask_token=mask_token(c, c.positive("vocab_size")) if MASK_STATE in names else None,
            qk_norms=head_norms if "layers.0.self_attn.q_norm.weight" in names else None,
        )


@dataclass(frozen=True, kw_only=True)
class LatentEagle3Config(LatentConfig, Eagle3Config):
    """The config of a head with attention over latents, as in DeepSeek V3."""

    @classmethod
    def numbers(cls, c: Checkpoint, **own: Any) -> Self:
        return cls.common_latent(c, **own)

    def attention_in(self, mesh: Mesh, layer: int) -> LatentBlock:
        if layer:
            return LatentBlock(self, mesh, layer)
        made, heads = LatentBlock(replace(self, hidden_size=2 * self.hidden_size), mesh, layer), self.latent_heads
        made.o_proj = ColumnLinear(heads.count * heads.value, self.hidden_size, mesh, bias=self.out_bias)
        return made


class Borrower(DecoderStack):
    """A head that guesses with the embedding and the head of a model, which `lend` gives it, where it has none of its
    own."""

    _lent: tuple[DecoderStack] | None = None

    def lend(self, model: DecoderStack) -> None:
        """Use the embedding and the head of the loaded model."""
        self._lent = (model,)  # no part of this module

    def embedded(self, batch: ModelInput) -> Tensor:
        """Return the embeddings of the next tokens, [tokens, hidden]."""
        if self._lent is None:  # a dry run
            sizes = len(batch.token_ids), self.config.hidden_size
            return torch.empty(sizes, dtype=_states(batch).dtype, device="meta")
        (model,) = self._lent
        assert model.embed_tokens is not None
        return model.embed_tokens(batch.token_ids)

    def lent_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] of the model's head behind streams [rows, hidden]."""
        if self._lent is None:  # a dry run
            return torch.empty(len(hidden), self.config.vocab_size, device="meta")
        (model,) = self._lent
        assert model.embed_tokens is not None
        return model.embed_tokens.mesh.gather(model.compute_logits(hidden))[:, : self.config.vocab_size].contiguous()


class DraftHead(Borrower):
    """A head with the part of the model that it uses.

    Its input holds the states [tokens, states_size] as `received`, and the ids of the tokens behind each. It returns
    its stream [tokens, hidden], which are the states behind a guess.
    """

    config: HeadConfig

    def __init__(self, c: HeadConfig, mesh: Mesh, layer: Callable[[int], nn.Module]) -> None:
        super().__init__(c, mesh, layer)
        self.embed_tokens = Embedding(c.embedded_tokens, c.hidden_size) if c.has_embedding else None
        self.add = addition()

    @property
    def states_size(self) -> int:
        """Width of the states that the model gives."""
        return self.config.hidden_size

    @property
    def received_size(self) -> int | None:
        return self.states_size

    def embedded(self, batch: ModelInput) -> Tensor:
        return super().embedded(batch) if self.embed_tokens is None else self.embed_tokens(batch.token_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, tokens] behind streams of this head, [rows, hidden], by a table of its own or by
        the model's head."""
        return self.lent_logits(hidden) if self.lm_head is None else super().compute_logits(hidden)


def _states(batch: ModelInput) -> Tensor:
    assert batch.received is not None, "a head reads hidden states"
    return batch.received.hidden


class _EagleLayer(nn.Module):
    """Attention and MLP, without a norm before attention."""

    def __init__(self, c: HeadConfig, mesh: Mesh) -> None:
        super().__init__()
        self.self_attn = RotaryAttention(c, mesh, 0)
        self.post_attention_layernorm = stream_norm(c)
        self.mlp = GatedMLP(c, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), x)
        return self.mlp(x), residual


class EagleHead(DraftHead):
    """EAGLE: embedding and last hidden state become one vector, and one layer without a final norm makes the next."""

    IGNORED = (*DecoderStack.IGNORED, r"lm_head\.weight")

    @classmethod
    def read(cls, c: Checkpoint) -> HeadConfig:
        c.expect("num_hidden_layers", 1)
        return HeadConfig.read_head(c, tensor_names(c), has_head=False)

    def __init__(self, c: HeadConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda _: _EagleLayer(c, mesh))
        self.norm = None
        self.fc = ColumnLinear(2 * c.hidden_size, c.hidden_size, mesh, bias=c.fc_bias)

    def forward(self, batch: ModelInput) -> Tensor:
        x = self.fc(torch.cat((self.embedded(batch), _states(batch)), 1))
        x, residual = self.layers["0"](x, batch)
        return self.add(x, residual)


class _Eagle3Layer(nn.Module):
    """Attention over embedding and state side by side, each behind a norm; the state is the stream."""

    def __init__(self, c: Eagle3Config, mesh: Mesh) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = stream_norm(c), stream_norm(c)
        self.self_attn = c.attention_in(mesh, 0)
        self.post_attention_layernorm = stream_norm(c)
        self.mlp = GatedMLP(c, mesh)
        self._is_stream_normed = c.is_stream_normed

    def forward(self, x: Tensor, embedded: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        state = self.hidden_norm(x)
        both = torch.cat((self.input_layernorm(embedded), state), 1)
        y, residual = self.post_attention_layernorm.add(
            self.self_attn(both, batch), state if self._is_stream_normed else x
        )
        return self.mlp(y), residual


class _ChunkNorms(nn.Module):
    """A norm of each of the states that lie side by side."""

    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(i): c.norm(c.target_size, c.norm_eps) for i in range(c.num_noted)})

    def forward(self, states: Tensor) -> Tensor:
        chunks = states.chunk(len(self.parts), dim=1)
        return torch.cat([norm(each) for norm, each in zip(self.parts.values(), chunks, strict=True)], 1)


class Eagle3Head(DraftHead):
    """EAGLE-3: the streams of some layers become one vector; the head has logits of its own, of some of the tokens."""

    config: Eagle3Config
    IGNORED = (*DecoderStack.IGNORED, "d2t", "t2d", MASK_STATE)
    RENAMED = {"parts": ""}

    @classmethod
    def read(cls, c: Checkpoint) -> Eagle3Config:
        kind = Eagle3Config if c.optional_positive("kv_lora_rank") is None else LatentEagle3Config
        return kind.read_third(c)

    def __init__(self, c: Eagle3Config, mesh: Mesh) -> None:
        def layer(index: int) -> nn.Module:
            return GatedLayer(c, c.attention_in(mesh, index), GatedMLP(c, mesh)) if index else _Eagle3Layer(c, mesh)

        super().__init__(c, mesh, layer)
        self.input_norm = c.norm(self.states_size, c.norm_eps) if c.has_input_norm else None
        self.fc_norm = _ChunkNorms(c) if c.has_chunk_norms else None
        self.fc = ColumnLinear(self.states_size, c.hidden_size, mesh, bias=c.fc_bias)

    @property
    def states_size(self) -> int:
        return self.config.num_noted * self.config.target_size

    def own_name(self, name: str) -> str:
        return name.replace("midlayer.", "layers.0.", 1)

    def forward(self, batch: ModelInput) -> Tensor:
        states = _states(batch)
        # behind a guess the head reads its own stream
        x = self._joined(states) if states.shape[1] == self.states_size else states
        first, *others = self.layers.values()
        x, residual = first(x, self.embedded(batch), batch)
        for layer in others:
            x, residual = layer(x, residual, batch)
        stream: Tensor = self.add(x, residual)
        return self._normed(stream) if self.config.is_output_normed else stream

    def _joined(self, states: Tensor) -> Tensor:
        """Return one vector [tokens, hidden] of the model's states."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            states = self.fc_norm(states)
        return self.fc(states)

    def _normed(self, stream: Tensor) -> Tensor:
        assert self.norm is not None
        return self.norm(stream)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden if self.config.is_output_normed else self._normed(hidden))


def tensor_names(c: Checkpoint) -> frozenset[str]:
    """Return the names of a head's tensors, without prefix, as this module's classes have them."""
    names = (tensor.name.removeprefix("model.") for tensor in checkpoint_tensors(c))
    return frozenset(name.replace("midlayer.", "layers.0.", 1) for name in names)


def _are_layers(noted: object) -> bool:
    return isinstance(noted, list) and len(noted) > 1 and all(type(each) is int for each in noted)


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers before which an EAGLE-3 head reads the stream of a model with so many."""
    return 2, num_layers // 2, num_layers - 3


def mask_token(c: Section, vocab_size: int, name: str = "mask_token_id") -> int:
    """Return the token that stands for those that are guessed. Raises CheckpointError for none of the model's."""
    token = c.int(name)
    if not 0 <= token < vocab_size:
        raise c.error(name, f"a token from 0 to {vocab_size - 1:,}")
    return token


def parallel_token(c: Checkpoint) -> int | None:
    """Return the token in the place of later ones that a draft model was trained for; None where there is none."""
    name = next((each for each in ("pard_token", "ptd_token_id") if c.values.get(each) is not None), None)
    return None if name is None else mask_token(c, c.positive("vocab_size"), name)


def target_ids(c: Checkpoint, num_tokens: int, vocab_size: int) -> Tensor | None:
    """Return for each token of a head's logits its id in the model, int64 [num_tokens]; None where the ids are the
    same. Raises CheckpointError for ids that are not below `vocab_size`."""
    for tensor in checkpoint_tensors(c):
        if tensor.name == "d2t":
            offsets = tensor.values(((),)).to(torch.int64)
            ids = offsets + torch.arange(len(offsets)) if offsets.shape == (num_tokens,) else None
            if ids is None or bool(((ids < 0) | (ids >= vocab_size)).any()):
                raise CheckpointError(
                    f"{c.path}: the tensor d2t has the shape {list(offsets.shape)}, expected [{num_tokens}], each with "
                    f"its place a token from 0 to {vocab_size - 1:,} of the model"
                )
            return ids
    return None


def mask_state(c: Checkpoint, dtype: torch.dtype, width: int) -> Tensor:
    """Return the state that a P-EAGLE head reads at masks, [1, width]. Raises CheckpointError."""
    tensor = next(each for each in checkpoint_tensors(c) if each.name == MASK_STATE)
    state = tensor.values(((),)).to(dtype)
    if state.numel() != width:
        raise CheckpointError(f"{c.path}: {MASK_STATE} has {state.numel():,} values, expected {width:,}")
    return state.reshape(1, -1)
