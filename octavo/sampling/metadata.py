"""Defines what the sampler reads of a row and its sequence, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs


class SampledSequence(Protocol):
    """The part of the worker's sequence state that sampling reads."""

    @property
    def index(self) -> int:
        """Index of the sequence in its group; part of the key of its draws."""

    @property
    def params(self) -> SamplingParams:
        """`seed` is set for every request that is not greedy."""

    @property
    def num_prompt_tokens(self) -> int: ...

    def first_tokens(self, count: int) -> NDArray[np.int32]:
        """Return the first `count` tokens of prompt and output, a view that is valid during the step."""

    @property
    def line(self) -> int:
        """The sequence's line of `stored_tokens`."""

    def stored_tokens(self) -> Tensor:
        """Return the tokens of all sequences, int32 [lines, width], on the device, including drawn tokens that the host
        does not know yet."""

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Ids that `min_tokens` bars."""

    @property
    def bad_words_token_ids(self) -> Sequence[Sequence[int]]: ...


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """One row of logits, from which token number `position` of `sequence` is drawn.

    With `num_samples` 1 the token is drawn for the sequence itself; with more, sample `i` is for child `i`.
    num_drafts: how many of the last tokens before the position are drafts. They may be wrong, so no state that is kept
    for the sequence may count them.
    """

    sequence: SampledSequence
    position: int
    num_samples: int = 1
    num_drafts: int = 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output before the position."""
        return self.sequence.first_tokens(self.position)


class RowSamples(msgspec.Struct, frozen=True, gc=False):
    """The tokens drawn for one row; none where there is an `error`."""

    tokens: list[TokenLogprobs]
    error: RequestError | None = None
    candidates: TokenLogprobs | None = None
    """The likeliest tokens, of a row of a beam search."""


def verified(drafts: Sequence[int], drawn: Sequence[RowSamples]) -> RowSamples:
    """Return the drawn tokens up to and including the first that differs from its draft, as one result.

    drawn: the results after the last known token and after each draft. An error after the first token is left to a
    later row, which draws at that position first; so is a position that is drawn later.
    """
    if not drafts or not drawn[0].tokens:
        return drawn[0]
    tokens: list[TokenLogprobs] = []
    for result, draft in zip(drawn, (*drafts, None), strict=True):
        if not result.tokens:
            break
        tokens += result.tokens
        if result.tokens[0].token_id != draft:
            break
    return RowSamples(tokens)
