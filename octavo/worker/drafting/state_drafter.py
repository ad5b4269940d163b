"""Guesses several next tokens of each sequence from one state of the model, with a head without state of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention.metadata import IntermediateTensors
from octavo.core.step import RowOutput
from octavo.worker.batch.input_batch import BatchRow
from octavo.worker.drafting.drafter import Drafter, DrafterParts, Span


class StateDrafter(Drafter):
    """A drafter with a head of Medusa, or an MLP speculator. It keeps nothing of a sequence, so it may begin anywhere.

    A guess costs a pass.
    """

    def __init__(self, head: Any, parts: DrafterParts) -> None:
        """head: a `StateHead`, or what has its `most`, `carried` and `logits`."""
        super().__init__(head, parts, is_head=True)
        self._head = head

    def _span(self, place: int, row: BatchRow, output: RowOutput) -> Span | None:
        scheduled, state = row
        count = min(scheduled.num_proposals, self._head.most) if output.tokens else 0
        known = state.num_tokens
        return Span(place, state, known - 2, known - 1, known, count) if count else None

    def _compute(self, spans: Sequence[Span], rows: Sequence[BatchRow], states: Sequence[Tensor]) -> Tensor:
        """Return the model's states [spans, hidden] before the last known tokens."""
        starts = [0, *accumulate(row.scheduled.num_tokens for row in rows)]
        places = [starts[span.place] + span.first - rows[span.place].scheduled.start for span in spans]
        (hidden,) = states
        return hidden[torch.tensor(places, device=hidden.device)]

    def _features(self, count: int, spans: Sequence[Span], hidden: Tensor) -> Tensor:
        """Return the head's features from the states before a guess and the tokens there, [spans, width]."""
        self.num_passes += 1
        features: Tensor = self._head.features(count, hidden, self._last_tokens(spans, count, hidden.device))
        return features

    def _logits_of(self, count: int) -> Callable[[Tensor], Tensor]:
        return partial(self._head.logits, count)

    def _behind(
        self, spans: Sequence[Span], positions: Sequence[int], numbers: Sequence[int], made: Tensor, hidden: Tensor
    ) -> Tensor:
        read: Tensor = self._head.carried(made, hidden)
        return read[torch.tensor(numbers, device=read.device)]

    def _last_tokens(self, spans: Sequence[Span], count: int, device: torch.device) -> Tensor:
        """Return the tokens before the guesses of this number, int64 [spans]."""
        token_ids = torch.empty(len(spans), dtype=torch.int64, device=device)
        lines = np.array([span.state.line for span in spans], dtype=np.int64)
        positions = np.array([span.num_known - 1 + count for span in spans], dtype=np.int64)
        self._tokens.gather(lines, positions, out=token_ids)
        return token_ids


class AssistantDrafter(StateDrafter):
    """A drafter with an assistant of Gemma 4, whose builder is over the model's caches.

    All guesses are made at the position of the last known token, and read the model's KV of the tokens before it.
    """

    def _features(self, count: int, spans: Sequence[Span], hidden: Tensor) -> Tensor:
        self.num_passes += 1
        batch = self._builder.build([span.row(span.first, span.end) for span in spans])
        made: Tensor = self._head(
            replace(
                batch,
                token_ids=self._last_tokens(spans, count, hidden.device),
                positions=batch.positions + 1,
                received=IntermediateTensors(hidden, None),
            )
        )
        return made
