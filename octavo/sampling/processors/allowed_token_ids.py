"""`allowed_token_ids`: everything else is barred."""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SampledSequence
from octavo.sampling.processors.processor import ProcessedRow, placed


class AllowedTokenIds:
    """Leaves the logits of the allowed ids and sets all others to -inf."""

    name = "allowed_token_ids"

    def __init__(self) -> None:
        self._rows: Sequence[ProcessedRow] = ()
        # a cache: the lists may be long
        self._allowed: WeakKeyDictionary[SampledSequence, NDArray[np.int64]] = WeakKeyDictionary()

    def needs(self, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows = rows

    def apply(self, logits: Tensor) -> None:
        for each in self._rows:
            token_ids = self._allowed.get(each.sequence)
            if token_ids is None:
                token_ids = np.array(each.sequence.params.allowed_token_ids, dtype=np.int64)
                self._allowed[each.sequence] = token_ids
            allowed = placed(token_ids, logits)
            row = logits[each.row]
            kept = row[allowed]
            row.fill_(-math.inf)
            row[allowed] = kept
