"""Defines a filter: it drops tokens from the distribution that a token is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from octavo.core.sampling_params import SamplingParams


class Filter(Protocol):
    """The definition of a filter, which a sampler without an implementation of its own calls.

    A row's result depends on that row and its parameters alone, with all its bits, and at least one token remains.
    """

    name: str
    """The sampling parameter that turns it on."""

    def needs(self, params: SamplingParams) -> bool:
        """Return whether it can drop a token of a request with these parameters."""

    def drop(self, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
        """Set to -inf, in place, what is not kept of `scaled`, float32 [rows, vocab] (see `scale`).

        `params` has one entry for each row, and all of them need the filter.
        """
