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
        """Index of the sequence in its group, which is part of the key of its draws."""
        ...

    @property
    def params(self) -> SamplingParams:
        """`seed` is set for every request that is not greedy."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    def first_tokens(self, count: int) -> NDArray[np.int32]:
        """Return the first `count` tokens of prompt and output, a view that is valid during the step."""
        ...

    @property
    def line(self) -> int:
        """Its line of `stored_tokens`."""
        ...

    def stored_tokens(self) -> Tensor:
        """Return the tokens of all sequences, int32 [lines, width], where the device has them: also those that it has
        drawn and the host does not know yet."""
        ...

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Ids that `min_tokens` bars."""
        ...

    @property
    def bad_words_token_ids(self) -> Sequence[Sequence[int]]: ...


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """One row of logits: those from which token number `position` of `sequence` is drawn.

    With `num_samples` 1 the token is drawn for the sequence itself; with more, sample `i` is for child `i`.
    num_drafts: how many of the tokens before the position are drafts, the last ones. They may turn out to be wrong, so
    nothing that is kept for the sequence may count them.
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
    """What was drawn for one row; nothing where there is an `error`."""

    tokens: list[TokenLogprobs]
    error: RequestError | None = None
    candidates: TokenLogprobs | None = None
    """The likeliest tokens, of a row of a beam search."""


def verified(drafts: Sequence[int], drawn: Sequence[RowSamples]) -> RowSamples:
    """Return the tokens up to and with the first that differs from the draft in its place, as one result.

    `drawn` are the results after the last known token and after each draft. An error behind the first token is left to
    a later row, which draws at that position as its first; so is a position from which is drawn later.
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
