"""`logit_bias`: a number added to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.processors.processor import ProcessedRow, placed


class LogitBias:
    """Adds each bias once."""

    name = "logit_bias"

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self._values: list[float] = []

    def needs(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows, self._token_ids, self._values = [], [], []
        for each in rows:
            bias = each.sequence.params.logit_bias or {}
            self._rows += [each.row] * len(bias)
            self._token_ids += bias.keys()
            self._values += bias.values()

    def apply(self, logits: Tensor) -> None:
        rows, token_ids = placed(self._rows, logits), placed(self._token_ids, logits)
        logits[rows, token_ids] += placed(self._values, logits, np.float32)
