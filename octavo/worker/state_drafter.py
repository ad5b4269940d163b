"""Guesses several tokens behind each sequence from one state of the model, with a head that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention.metadata import IntermediateTensors
from octavo.core.step import RowOutput
from octavo.sampling.metadata import SamplingRow
from octavo.worker.drafter import Drafter, DrafterParts, Span
from octavo.worker.input_batch import BatchRow


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

    def _guess(self, active: Sequence[Span], hidden: Tensor) -> dict[int, list[int]]:
        """Return the guesses by place, which follow from `hidden`, [spans, hidden]."""
        guesses: dict[int, list[int]] = {span.place: [] for span in active}
        for stage in range(max((span.num_guesses for span in active), default=0)):
            self.num_passes += 1
            made = self._features(stage, active, hidden)
            rows = [SamplingRow(span.state, span.num_known + stage, 1, stage) for span in active]
            chosen = self._choices(made, rows, partial(self._head.logits, stage))
            pairs = [(number, token) for number, token in enumerate(chosen) if token is not None]
            for number, token in pairs:
                guesses[active[number].place].append(token)
            pairs = [(number, token) for number, token in pairs if active[number].num_guesses > stage + 1]
            active = [active[number] for number, _ in pairs]
            if not active:
                break
            positions = [span.num_known + stage for span in active]
            self._tokens.append([span.state.line for span in active], positions, [token for _, token in pairs])
            read = self._head.carried(made, hidden)
            hidden = read[torch.tensor([number for number, _ in pairs], device=read.device)]
        return guesses

    def _features(self, stage: int, spans: Sequence[Span], states: Tensor) -> Tensor:
        """Return what the head makes of the states before a guess and the tokens there, [spans, width]."""
        features: Tensor = self._head.features(stage, states, self._last_tokens(spans, stage, states.device))
        return features

    def _last_tokens(self, spans: Sequence[Span], stage: int, device: torch.device) -> Tensor:
        """Return the tokens before the guesses of a stage, int64 [spans]."""
        token_ids = torch.empty(len(spans), dtype=torch.int64, device=device)
        lines = np.array([span.state.line for span in spans], dtype=np.int64)
        positions = np.array([span.num_known - 1 + stage for span in spans], dtype=np.int64)
        self._tokens.gather(lines, positions, out=token_ids)
        return token_ids


class AssistantDrafter(StateDrafter):
    """A drafter with an assistant of Gemma 4, whose builder is over the model's caches.

    All guesses are made at the position of the last known token, and see what the model keeps of those before it.
    """

    def _features(self, stage: int, spans: Sequence[Span], states: Tensor) -> Tensor:
        batch = self._builder.build([span.row(span.first, span.end) for span in spans])
        made: Tensor = self._head(
            replace(
                batch,
                token_ids=self._last_tokens(spans, stage, states.device),
                positions=batch.positions + 1,
                received=IntermediateTensors(states, None),
            )
        )
        return made
