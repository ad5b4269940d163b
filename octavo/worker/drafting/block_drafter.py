"""Guesses several tokens behind each sequence in one pass, with a head that fills masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from octavo.models.block_heads import BlockHead, MarkovHead
from octavo.sampling.metadata import SamplingRow
from octavo.worker.drafting.drafter import Drafter, DrafterParts, Span


class _MaskDrafter(Drafter):
    """A drafter that makes all guesses of a sequence at once.

    mask_token: stands in the place of tokens that are guessed. most: guesses of one pass for a sequence.
    """

    def __init__(self, head: Any, parts: DrafterParts, mask_token: int, most: int, *, is_head: bool = True) -> None:
        super().__init__(head, parts, is_head=is_head)
        self._mask_token, self._most = mask_token, most

    def _num_masks(self, span: Span) -> int:
        return min(span.num_guesses, self._most, self._max_num_tokens - 1, self._max_positions - span.num_known)

    def _mask(self, spans: Sequence[Span], counts: Sequence[int]) -> None:
        """Append so many masks to the known tokens of each span."""
        for span, count in zip(spans, counts, strict=True):
            positions = [*range(span.num_known, span.num_known + count)]
            if positions:
                self._tokens.append([span.state.line] * count, positions, [self._mask_token] * count)
        # a guess costs as much as a pass of its share
        self.num_passes += max(counts, default=0)

    def _fill(self, states: Tensor, spans: Sequence[Span], counts: Sequence[int]) -> dict[int, list[int]]:
        """Return guesses by place. states: [guesses, hidden], those of each span one after the other."""
        wanted = [
            SamplingRow(span.state, span.num_known + i, 1, i)
            for span, count in zip(spans, counts, strict=True)
            for i in range(count)
        ]
        chosen = iter(self._choices(states, wanted))
        return {
            span.place: _before_none([next(chosen) for _ in range(count)])
            for span, count in zip(spans, counts, strict=True)
        }

    def _parts(self, active: Sequence[Span]) -> Iterator[tuple[list[Span], list[int]]]:
        """Yield the spans whose masks one pass computes together, and how many each has."""
        part: list[Span] = []
        counts: list[int] = []
        room = self._max_num_tokens
        for span in active:
            if (count := self._num_masks(span)) <= 0:
                continue
            if part and room < 1 + count:
                yield part, counts
                part, counts, room = [], [], self._max_num_tokens
            part.append(span)
            counts.append(count)
            room -= 1 + count
        if part:
            yield part, counts


class BlockDrafter(_MaskDrafter):
    """A drafter with a DFlash head, which makes keys and values of known tokens, and fills masks behind the last."""

    def __init__(self, head: BlockHead, parts: DrafterParts) -> None:
        self._is_anchor_first = head.config.is_anchor_first
        super().__init__(head, parts, head.config.mask_token, head.config.block_size - (not self._is_anchor_first))

    def _guess(self, active: Sequence[Span], hidden: Tensor) -> dict[int, list[int]]:
        """Return the guesses by place; `hidden` is what keys and values of known tokens were made of."""
        guesses: dict[int, list[int]] = {}
        for spans, counts in self._parts(active):
            masks = [count - self._is_anchor_first for count in counts]
            self._mask(spans, masks)
            both = [*zip(spans, masks, strict=True)]
            rows = [span.row(span.num_known - 1, span.num_known + count) for span, count in both]
            batch = self._builder.build(rows)
            states = self._model(batch)
            anchors = [0, *accumulate(1 + count for count in masks)][:-1]
            starts = [at + (not self._is_anchor_first) for at in anchors]
            indices = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
            read = states[torch.tensor(indices, device=states.device)]
            guesses |= self._behind_anchors(read, batch.token_ids[anchors], spans, counts)
        return guesses

    def _behind_anchors(
        self, states: Tensor, anchors: Tensor, spans: Sequence[Span], counts: Sequence[int]
    ) -> dict[int, list[int]]:
        """Return guesses as `_fill`. anchors: the last known token of each span, int64 [spans]."""
        return self._fill(states, spans, counts)


class MarkovDrafter(BlockDrafter):
    """A drafter with a DSpark head, whose guesses follow from those before them."""

    _model: MarkovHead

    def _behind_anchors(
        self, states: Tensor, anchors: Tensor, spans: Sequence[Span], counts: Sequence[int]
    ) -> dict[int, list[int]]:
        starts = [0, *accumulate(counts)]
        guesses: dict[int, list[int]] = {span.place: [] for span in spans}
        active, before, place = [*range(len(spans))], anchors, 0
        while active:
            read = torch.tensor([starts[each] + place for each in active], device=states.device)
            rows = [SamplingRow(spans[each].state, spans[each].num_known + place, 1, place) for each in active]
            # indices and tokens are cut into the same chunks of rows
            chosen = self._choices(torch.stack((read, before), 1), rows, partial(self._logits, states))
            found = [(each, token) for each, token in zip(active, chosen, strict=True) if token is not None]
            for each, token in found:
                guesses[spans[each].place].append(token)
            place += 1
            found = [(each, token) for each, token in found if counts[each] > place]
            active, before = [each for each, _ in found], anchors.new_tensor([token for _, token in found])
        return guesses

    def _logits(self, states: Tensor, pairs: Tensor) -> Tensor:
        """pairs: int64 [rows, 2], the rows of `states` and the tokens before."""
        return self._model.logits_behind(states[pairs[:, 0]], pairs[:, 1])


class ParallelDrafter(_MaskDrafter):
    """A drafter whose first guess is the usual one, and the others come from masks behind it, all in one pass.

    It has a P-EAGLE head, with one learned state at masks, or a draft model that was trained for masks (PARD).
    Sources: https://arxiv.org/abs/2602.01469, https://arxiv.org/abs/2504.18583.
    """

    def __init__(self, model: Any, parts: DrafterParts, mask_token: int, state: Tensor | None) -> None:
        """state: of masks, [1, width]; None for a draft model."""
        super().__init__(model, parts, mask_token, parts.builder.max_num_tokens, is_head=state is not None)
        self._state = state

    def _guess(self, active: Sequence[Span], hidden: Tensor) -> dict[int, list[int]]:
        """Return the guesses by place, of which the first follow from `hidden`, [spans, hidden]."""
        guesses: dict[int, list[int]] = {span.place: [] for span in active}
        first = {span.place: index for index, span in enumerate(active)}
        for spans, counts in self._parts(active):
            others = [count - 1 for count in counts]
            self._mask(spans, others)
            # a head's position is one token before the token that it reads
            starts = [span.num_known - self._is_head for span in spans]
            both = zip(spans, starts, others, strict=True)
            rows = [span.row(start, start + count) for span, start, count in both if count]
            parts = [hidden[first[span.place]][None] for span in spans]
            if rows:
                read = None if self._state is None else self._state.expand(sum(others), -1)
                behind = torch.split(self._pass(rows, read), others)
                parts = [torch.cat(each) for each in zip(parts, behind, strict=True)]
            guesses |= self._fill(torch.cat(parts), spans, counts)
        return guesses


def _before_none(chosen: Sequence[int | None]) -> list[int]:
    found = []
    for token in chosen:
        if token is None:
            break
        found.append(token)
    return found
