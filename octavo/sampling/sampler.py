"""The seam between the model runner and sampling, and the choice of what is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.sampling.filters import Filter, default_filters
from octavo.sampling.metadata import RowSamples, SamplingRow
from octavo.sampling.native import NativeSampler, native_bytes
from octavo.sampling.processors import LogitsProcessor, default_processors
from octavo.sampling.reference import ReferenceSampler, reference_bytes


class Sampler(Protocol):
    """From logits to drawn tokens with their log-probabilities. A row's result depends on that row alone."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        """Draw for each of `rows` from its row of `logits`, float32 [rows, vocab], which is overwritten.

        A row whose logits are not numbers, or whose tokens are all barred, gets an error; the others are not affected.
        """
        ...

    def rank(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        """For beam search, return, instead of drawing, the `counts[i]` tokens with the largest values, as `candidates`.

        The values are the `scores` of the candidates: log-probabilities on which the processors have acted, as in
        transformers. They are not normalised again, and -inf is a barred token, whose id means nothing. Beside them
        stand the model's own log-probabilities. float32 logits [rows, vocab], which are overwritten.
        """
        ...

    def describe(self, logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
        """Log-probability and rank of one given token in each row of `logits`, float32 [rows, vocab].

        With the `num_logprobs` likeliest tokens there. The log-probability is NaN where logits are not numbers.
        """
        ...


def make_sampler(runtime: Any, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()) -> Sampler:
    """The sampler for the device's runtime (`ops.registry.open_runtime`): the reference where there is none.

    `processors` act before those that sampling parameters ask for, `filters` after them.
    """
    if runtime is None:
        return ReferenceSampler((*processors, *default_processors()), (*default_filters(), *filters))
    return NativeSampler(runtime.cpu, processors, filters)


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """Most bytes that `Sampler.sample` holds for that many rows of logits, whichever sampler it is."""
    return max(reference_bytes(num_rows, vocab_size), native_bytes(num_rows, vocab_size))
