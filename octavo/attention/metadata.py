"""What the model receives for one step: the tokens it computes and where their keys and values live.

The runner builds these once per step; models, layers and attention backends only read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from operator import attrgetter, is_
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo.ops.recurrent import TokenRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttentionMetadata(TokenRows):
    """Where this step's tokens live in one cache group, and what is derived from it once per step."""

    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `once` has computed in this step, and what layers leave for later ones."""

    @classmethod
    def of_slots(cls, slots: Tensor, block_size: int) -> AttentionMetadata:
        """Return metadata without rows: `slots`, int64 [vectors], are written and nothing is read."""
        none = slots.new_zeros(1, dtype=torch.int32)
        return cls(none, none[:0], none[:0].view(0, 0), slots, block_size, (), ())

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return `compute()` the first time that `key` is given in this step, the same object afterwards.

        All layers of a step need the same gather indices and masks; the first one pays for them.
        """
        if key not in self.derived:
            self.derived[key] = compute()
        value: T = self.derived[key]
        return value


@dataclass(frozen=True, slots=True)
class EmbeddingOverride:
    """Vectors that take the place of the token embeddings of some tokens of a batch: those of an image, say.

    The ids of these tokens are not used, but must be in the vocabulary.
    """

    token_indices: Tensor
    """int64 [overridden]: flat indices of the tokens, each once."""
    values: Tensor
    """[overridden, embedding size], in the model's type."""
    levels: Mapping[int, Tensor] = field(default_factory=dict)
    """What is added to these tokens behind layers (DeepStack), [overridden, hidden] each; -1 is the first's input."""

    def put_into(self, x: Tensor) -> Tensor:
        """Return x [tokens, embedding size] with the vectors in their places."""
        return x.index_copy(0, self.token_indices, self.values)


class SpanRows(NamedTuple):
    """Tokens of this step that see all tokens of their own span, later ones too: those of images in some models."""

    token_indices: Tensor
    """int64 [tokens of spans]: flat indices of the tokens, span by span."""
    attention: Sequence[AttentionMetadata]
    """For each cache group; a row is what this step computes of one span, and its length ends with the span."""


class TokenKinds(NamedTuple):
    """Flat indices of tokens, int64: those that stand for images, with the one before and the one behind each image,
    and all others."""

    images: Tensor
    others: Tensor


class EncoderOutput(NamedTuple):
    """What an encoder made of one input, whose keys and values are written in this step, and where they go."""

    states: Tensor
    """[vectors, width], in the model's type."""
    written: AttentionMetadata
    """Without rows; its `slot_mapping` has the slot of each vector."""
    adapter: int = 0
    """The index of its sequence's adapter, 0 for none."""


class IntermediateTensors(NamedTuple):
    """What one pipeline stage sends to the next."""

    hidden: Tensor
    """[tokens, hidden]"""
    residual: Tensor | None = None
    """[tokens, hidden]; the residual stream is the sum of both, or `hidden` alone where this is None."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors, without a residual that is None."""
        return (self.hidden,) if self.residual is None else (self.hidden, self.residual)


class NotedStates(NamedTuple):
    """What a model returns whose layers are noted for a draft head."""

    hidden: Tensor
    """[tokens, hidden]: the last hidden states."""
    streams: tuple[Tensor, ...]
    """[tokens, hidden] each: the residual stream before some of the layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.hidden.nbytes + sum(each.nbytes for each in self.streams)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a model reads for one step. The worker's is valid until the next one is built: it has views of buffers."""

    token_ids: Tensor
    """int64 [tokens]: the tokens of all rows, one row after the other."""
    positions: Tensor
    """int64 [tokens]: the position of each token in its sequence, from 0, less what images before it save (M-RoPE)."""
    attention: Sequence[AttentionMetadata]
    """Where the tokens live, for each cache group. Only block tables and slots differ between groups; of a group with
    encoders' outputs each token that sees some is a row of its own, which sees all of these vectors."""
    kv_caches: Sequence[Tensor]
    """One tensor per cache of a layer on this rank, in the layout of `cache_layout`."""
    rope_positions: Tensor | None = None
    """int64 [4, tokens]: positions in time, rows, columns and among images, where those of images differ; mostly
    None."""
    embeddings: EmbeddingOverride | None = None
    """Vectors in place of token embeddings; None in nearly every step."""
    spans: SpanRows | None = None
    """Tokens that attend to each other; None in nearly every step."""
    adapter_of_token: Tensor | None = None
    """int32 [tokens]: the index of each token's adapter, 0 for none; None where no token has one."""
    kinds: TokenKinds | None = None
    """Which tokens are of images, where some are and the model has experts for them; else None."""
    token_types: Tensor | None = None
    """int64 [tokens]: 1 for the tokens of the second text of a pair; None where no row is one."""
    seeing: Tensor | None = None
    """int64 [tokens that see an encoder's output]: flat indices of these; None where all do or no model reads any."""
    encoded: Sequence[EncoderOutput] = ()
    """What encoders made of inputs of this step's rows, where layers read it through caches; mostly ()."""
    received: IntermediateTensors | None = None
    """What the pipeline stage before this one sent, or the states that a draft head reads; else None."""
    packed: Tensor | None = None
    """The one memory, uint8, of positions and of the tensors of `attention`, where they lie together; else None."""
    with_adapters: Callable[[Tensor], AbstractContextManager[None]] | None = None
    """Returns a context whose products have a row for each of these indices of adapters; None where no token has one,
    or where all products have a row for each token."""

    @property
    def is_plain(self) -> bool:
        """Whether all its fields that are set are among those that a step repeated without Python reads."""
        return all(map(is_, _others(self), _DEFAULTS))

    def products_of_tokens(self, tokens: Tensor) -> AbstractContextManager[None]:
        """Return a context whose products have a row for each of these tokens alone, int64 flat indices."""
        if self.with_adapters is None or self.adapter_of_token is None:
            return nullcontext()
        return self.with_adapters(self.adapter_of_token[tokens])

    def products_of(self, output: EncoderOutput) -> AbstractContextManager[None]:
        """Return a context whose products have a row for each vector of an encoder's output."""
        if self.with_adapters is None or self.adapter_of_token is None:
            return nullcontext()
        return self.with_adapters(self.adapter_of_token.new_full((len(output.states),), output.adapter))


_REPEATED: Final = frozenset(
    {"token_ids", "positions", "attention", "kv_caches", "received", "packed", "adapter_of_token"}
)
"""The fields of `ModelInput` that a repeated step reads. Products read adapters elsewhere (`lora.step_slots`)."""
_OTHERS: Final = tuple(each for each in fields(ModelInput) if each.name not in _REPEATED)
_DEFAULTS: Final = tuple(each.default for each in _OTHERS)
_others: Final = attrgetter(*[each.name for each in _OTHERS])
