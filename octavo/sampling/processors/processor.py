"""The extension point for what changes logits before a token is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SampledSequence, SamplingRow


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """Row number `row` of the logits, and what is drawn from it."""

    row: int
    sampling: SamplingRow

    @property
    def sequence(self) -> SampledSequence:
        """The sequence that the row belongs to."""
        return self.sampling.sequence


class LogitsProcessor(Protocol):
    """Changes the logits of the rows that need it. Per step: `update` with those rows, then `apply`.

    State that it keeps between steps must be recomputable from a sequence's tokens, because a preempted or moved
    sequence arrives without it, and must not count drafts (`SamplingRow.num_drafts`).
    """

    name: str

    def needs(self, params: SamplingParams) -> bool:
        """Return whether a request with these parameters can ever be changed by this processor."""

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        """Prepare the next `apply` to these rows, whose parameters all need it."""

    def apply(self, logits: Tensor) -> None:
        """Change `logits`, float32 [rows, vocab], in place."""


@runtime_checkable
class MaskingProcessor(LogitsProcessor, Protocol):
    """A processor that only bars tokens: samplers may use its masks instead of `apply`."""

    def mask(self, row: SamplingRow) -> NDArray[np.uint32] | None:
        """Return the tokens that may be drawn: bit i of word t for token 32 t + i, none behind its end; None for all.

        It is not changed before the next call for the same sequence.
        """


class BarringProcessor:
    """A `LogitsProcessor` that bars tokens, which follow from each row alone."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[int] = []

    @staticmethod
    def barred(row: SamplingRow) -> Sequence[int]:
        """Return the token ids that may not be drawn."""
        raise NotImplementedError

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows, self._token_ids = [], []
        for each in rows:
            token_ids = self.barred(each.sampling)
            self._token_ids += token_ids
            self._rows += [each.row] * len(token_ids)

    def apply(self, logits: Tensor) -> None:
        if self._rows:
            # two indices, not one flat index: an id outside the vocabulary raises instead of hitting the next row
            logits[placed(self._rows, logits), placed(self._token_ids, logits)] = -math.inf


def placed(values: Sequence[float] | NDArray[Any], logits: Tensor, dtype: DTypeLike = np.int64) -> Tensor:
    """Return numbers where the logits are, without waiting for what is computed there."""
    # numpy reads long lists several times as fast as torch does
    return torch.from_numpy(np.asarray(values, dtype=dtype)).to(logits.device, non_blocking=True)
