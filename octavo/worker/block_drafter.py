"""Guesses a block of tokens behind each sequence in one pass, with a head that fills masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.models.block_heads import BlockHead
from octavo.sampling.metadata import SamplingRow
from octavo.worker.drafter import Drafter, Span


class BlockDrafter(Drafter):
    """A drafter whose head makes keys and values of known tokens, and then all guesses of a sequence at once."""

    def __init__(self, head: BlockHead, *arguments: Any, **named: Any) -> None:
        super().__init__(head, *arguments, is_head=True, **named)
        self._block = head.config

    def _guess(self, active: Sequence[Span], hidden: Tensor) -> dict[int, list[int]]:
        """Return the guesses by place; `hidden` is what keys and values of known tokens were made of."""
        guesses: dict[int, list[int]] = {}
        for spans in self._parts([span for span in active if self._num_masks(span) > 0]):
            counts = [self._num_masks(span) for span in spans]
            for span, count in zip(spans, counts, strict=True):
                positions = [*range(span.num_known, span.num_known + count)]
                self._tokens.append([span.state.line] * count, positions, [self._block.mask_token] * count)
            # a guess costs as much as a pass of its share
            self.num_passes += max(counts)
            rows = [
                span.row(span.num_known - 1, span.num_known + count) for span, count in zip(spans, counts, strict=True)
            ]
            states = self._model(self._builder.build(rows))
            shift, indices, wanted, start = int(not self._block.is_anchor_first), [], [], 0
            for span, count in zip(spans, counts, strict=True):
                indices += [start + shift + i for i in range(count)]
                wanted += [SamplingRow(span.state, span.num_known + i, 1, i) for i in range(count)]
                start += 1 + count
            chosen = iter(self._choices(states[torch.tensor(indices, device=states.device)], wanted))
            for span, count in zip(spans, counts, strict=True):
                guesses[span.place] = _before_none([next(chosen) for _ in range(count)])
        return guesses

    def _num_masks(self, span: Span) -> int:
        room = min(self._block.block_size, self._max_num_tokens) - 1
        return min(span.num_guesses, room, self._max_positions - span.num_known)

    def _parts(self, active: Sequence[Span]) -> Iterator[list[Span]]:
        """Yield the spans whose blocks one pass computes together."""
        part: list[Span] = []
        room = self._max_num_tokens
        for span in active:
            if part and room < 1 + self._num_masks(span):
                yield part
                part, room = [], self._max_num_tokens
            part.append(span)
            room -= 1 + self._num_masks(span)
        if part:
            yield part


def _before_none(chosen: Sequence[int | None]) -> list[int]:
    found = []
    for token in chosen:
        if token is None:
            break
        found.append(token)
    return found
