"""`min_tokens`: no end token before that many tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors.processor import ProcessedRow, TokenMask


class MinTokens:
    """Bars the end tokens of sequences whose output is still too short."""

    name = "min_tokens"

    def __init__(self) -> None:
        self._barred = TokenMask()

    def needs(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._barred = TokenMask()
        for each in rows:
            self._barred.add(each.row, barred_by_min_tokens(each.sampling))

    def apply(self, logits: Tensor) -> None:
        self._barred.fill(logits, -math.inf)


def barred_by_min_tokens(row: SamplingRow) -> Sequence[int]:
    """Return the end tokens while the output is too short."""
    sequence = row.sequence
    num_output_tokens = row.position - sequence.num_prompt_tokens
    return sequence.end_token_ids if num_output_tokens < sequence.params.min_tokens else ()
