"""`repetition_penalty`, `frequency_penalty` and `presence_penalty`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SampledSequence, SamplingRow
from octavo.sampling.processors.processor import ProcessedRow


class Penalties:
    """First repetition (prompt and output), then frequency and presence (output).

    repetition: positive logits are divided by it, negative ones multiplied (Keskar et al. 2019, "CTRL").
    frequency, presence: `count * frequency + (count > 0) * presence` is subtracted, as in the OpenAI API.
    """

    name = "penalties"

    def __init__(self) -> None:
        # a cache: whatever is missing is counted again from the tokens; it goes with the sequence
        self._counts: WeakKeyDictionary[SampledSequence, TokenCounts] = WeakKeyDictionary()
        self._rows: list[tuple[ProcessedRow, TokenCounts]] = []

    def needs(self, params: SamplingParams) -> bool:
        return bool(asked_penalties(params))

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows = []
        for each in rows:
            counts = self._counts.get(each.sequence)
            if counts is None:
                counts = self._counts[each.sequence] = TokenCounts(each.sequence.num_prompt_tokens)
            self._rows.append((each, counts.at(each.sampling)))

    def apply(self, logits: Tensor) -> None:
        # row by row: a row's tokens are few, and the scratch stays that small
        for each, counts in self._rows:
            params = each.sequence.params
            row = logits[each.row]
            token_ids = torch.from_numpy(counts.token_ids).to(logits.device)
            output_counts = torch.from_numpy(counts.output_counts).to(logits.device)
            values = row[token_ids]
            if params.repetition_penalty != 1.0:
                penalty = params.repetition_penalty
                values = torch.where(values > 0, values / penalty, values * penalty)
            if params.frequency_penalty != 0.0:
                values -= output_counts * params.frequency_penalty
            if params.presence_penalty != 0.0:
                values -= (output_counts > 0) * params.presence_penalty
            row[token_ids] = values


def asked_penalties(params: SamplingParams) -> list[str]:
    """Return the names of the penalties that are not neutral."""
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    return [name for name, value in neutral.items() if getattr(params, name) != value]


class TokenCounts:
    """The distinct tokens of one sequence, and how often each is in its output. Grows with the sequence."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._place: dict[int, int] = {}
        self._token_ids = np.zeros(64, dtype=np.int64)
        self._output_counts = np.zeros(64, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._place)

    @property
    def capacity(self) -> int:
        """Entries for which there is room: the arrays stay where they are while this stays."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[distinct]: a view."""
        return self._token_ids[: len(self._place)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """[distinct]: occurrences in the output, 0 for tokens of the prompt alone; a view."""
        return self._output_counts[: len(self._place)]

    def at(self, row: SamplingRow) -> TokenCounts:
        """Return the counts for a row: these, brought up to date, or a copy that counts the drafts too."""
        counts = deepcopy(self) if row.num_drafts else self
        counts.catch_up(row.tokens)
        return counts

    def catch_up(self, tokens: NDArray[np.int32]) -> None:
        """Count the tokens that have come since the last call."""
        if self._num_counted < self._num_prompt_tokens:
            for token_id in np.unique(tokens[self._num_counted : self._num_prompt_tokens]).tolist():
                self._place_of(token_id)
            self._num_counted = min(self._num_prompt_tokens, len(tokens))
        for token_id in tokens[self._num_counted :].tolist():
            place = self._place_of(token_id)  # may put larger arrays in place
            self._output_counts[place] += 1
        self._num_counted = len(tokens)

    def _place_of(self, token_id: int) -> int:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
                self._output_counts = np.concatenate((self._output_counts, np.zeros_like(self._output_counts)))
            self._token_ids[place] = token_id
        return place
