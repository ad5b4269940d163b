"""Packs the parameters of a row in the layout that the compiled sampler reads."""

from __future__ import annotations

import math
import struct
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.filters import MinP, TopK, TopP
from octavo.sampling.metadata import SampledSequence, SamplingRow
from octavo.sampling.processors import (
    AllowedTokenIds,
    BadWords,
    LogitBias,
    LogitsProcessor,
    MaskingProcessor,
    MinTokens,
    Penalties,
)
from octavo.sampling.processors.penalties import TokenCounts
from octavo.sampling.random import packed_draw_key

# SamplingRequest of csrc/cpu/sampling/sampling.h, field by field
_LAYOUT = struct.Struct("=ffdiiifffiiiiQQQQQQQq")
REQUEST_BYTES = _LAYOUT.size
IN_THE_CALL = (AllowedTokenIds, LogitBias, MinTokens, BadWords, Penalties, MaskingProcessor)
"""The processors that the compiled sampler implements."""
FILTERS_IN_THE_CALL = (MinP, TopK, TopP)
"""The filters that the compiled sampler implements."""

_LOWEST = -float(np.finfo(np.float32).max)
_MOST = 2**31 - 1


class PackedRequest:
    """The parameters of one sequence: constant parts are packed once, those that depend on its tokens for each row."""

    def __init__(
        self,
        sequence: SampledSequence,
        vocab_size: int,
        processors: tuple[LogitsProcessor, ...] = (),
        *,
        masks: MaskingProcessor | None = None,
        is_for_reference: bool = False,
    ) -> None:
        params = sequence.params
        self._masks = masks
        self._mask: NDArray[np.uint32] | None = None
        self.is_for_reference = is_for_reference
        """Whether it needs filters or built-in processors that the compiled sampler does not implement."""
        self.processors = processors
        """The processors that this request needs before the compiled sampler."""
        # after a processor the logits are no longer the model's
        self.lists_logprobs = params.needs_logprobs and not processors
        """Whether the compiled sampler returns log-probabilities."""
        self.num_listed = min(params.logprobs or 0, vocab_size) if self.lists_logprobs else 0
        """How many likeliest tokens it lists with them."""
        self.is_greedy = params.is_greedy
        self._index = sequence.index
        self._seed = params.seed or 0
        bias = params.logit_bias or {}
        self._biased = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self._biases = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._allowed = np.unique(np.array(params.allowed_token_ids or (), dtype=np.int64))
        self._addresses = [address_of(each) for each in (self._biased, self._biases, self._allowed)]
        self._counts = TokenCounts(sequence.num_prompt_tokens) if Penalties().needs(params) else None
        self._counted = (0, 0)
        self._capacity = 0
        self._barred = np.empty(0, dtype=np.int64)
        self._can_bar = params.min_tokens > 0 or bool(params.bad_words)
        self._filters = (
            0.0 if self.is_greedy else params.temperature,
            math.log(params.min_p) if params.min_p > 0.0 else _LOWEST,
            params.top_p,
            min(max(params.top_k, 0), _MOST),
        )
        self._penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        is_constant = self._counts is None and not self._can_bar and masks is None
        self._constant = self._pack(1) if is_constant else None

    def for_row(self, row: SamplingRow) -> PackedRequest:
        """Return this, or a copy for a row with drafts, because each row of a sequence needs its own arrays."""
        if not row.num_drafts:
            return self
        other = copy(self)
        other._capacity = 0  # its counts will lie elsewhere
        return other

    def packed(self, row: SamplingRow) -> bytes:
        """Return the bytes for a row. They hold addresses of arrays of this object, valid until the next call."""
        if self._constant is not None and row.num_samples == 1:
            return self._constant
        if self._counts is not None:
            self._counts = self._counts.at(row)
        if self._can_bar:
            self._barred = np.array([*MinTokens.barred(row), *BadWords.barred(row)], dtype=np.int64)
        if self._masks is not None:
            self._mask = self._masks.mask(row)
        return self._pack(row.num_samples)

    @property
    def changes_scores(self) -> bool:
        """Whether a bias or a penalty changes log-probabilities of tokens that are not barred."""
        return len(self._biased) > 0 or self._counts is not None

    def changed_places(self, token_ids: list[int]) -> list[int]:
        """Return the places in `token_ids` of those whose log-probabilities a bias or a penalty changes."""
        penalized = np.empty(0, dtype=np.int64) if self._counts is None else self._counts.token_ids
        places: list[int] = np.flatnonzero(np.isin(token_ids, np.concatenate((self._biased, penalized)))).tolist()
        return places

    def keys(self, row: SamplingRow) -> bytes:
        """Return the keys of the row's draws: none for a greedy row."""
        if self.is_greedy:
            return b""
        if row.num_samples == 1:
            return packed_draw_key(self._seed, self._index, row.position)
        return b"".join(packed_draw_key(self._seed, index, row.position) for index in range(row.num_samples))

    def _pack(self, num_draws: int) -> bytes:
        counts = self._counts
        if counts is not None and counts.capacity != self._capacity:
            self._capacity = counts.capacity
            self._counted = (address_of(counts.token_ids), address_of(counts.output_counts))
        biased, biases, allowed = self._addresses
        return _LAYOUT.pack(
            *self._filters,
            num_draws,
            self.num_listed if self.lists_logprobs else -1,
            *self._penalties,
            0 if counts is None else len(counts),
            len(self._biased),
            len(self._barred),
            len(self._allowed),
            *self._counted,
            biased,
            biases,
            address_of(self._barred) if len(self._barred) else 0,
            allowed,
            0 if self._mask is None else address_of(self._mask),
            0 if self._mask is None else len(self._mask),
        )


def address_of(array: NDArray[Any]) -> int:
    """Return the address of the array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address
