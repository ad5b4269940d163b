"""Guesses the tokens after those that a step has drawn, with a second model over cache groups of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.attention.metadata import IntermediateTensors
from octavo.core.model_shape import ModelShape
from octavo.core.step import RowOutput, ScheduledSequence
from octavo.devices.device import LanguageModel
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.sampler import Sampler
from octavo.worker.batch.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences, SequenceState
from octavo.worker.drawing import LOGITS_BYTES

Choose = Callable[[Tensor, Sequence[SamplingRow]], Sequence[int | None]]
"""Returns a token for each row of logits, float32 [rows, vocab]; None for a row that gets none."""


class Span(NamedTuple):
    """Tokens [first, end) of a sequence, which the draft model has to compute before it makes `num_guesses`.

    place: of its row in the step. num_known: tokens that are known, those that were drawn in this step included.
    """

    place: int
    state: SequenceState
    first: int
    end: int
    num_known: int
    num_guesses: int

    def row(self, first: int, end: int) -> BatchRow:
        """Return the row that computes tokens [first, end)."""
        return BatchRow(ScheduledSequence(self.state.seq_id, self.state.epoch, first, end - first, 0), self.state)


class _Piece(NamedTuple):
    """Tokens [first, end) of a span, which one pass computes."""

    span: Span
    first: int
    end: int


def greedy(vocab_size: int) -> Choose:
    """Return a function that chooses the likeliest of the first `vocab_size` tokens."""
    return lambda logits, rows: logits[:, :vocab_size].argmax(-1).tolist()


def drawn_with(sampler: Sampler) -> Choose:
    """Return a function that draws with the sampling parameters and the key of the model's token at that position."""

    def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
        samples = sampler.sample(logits, rows)
        return [each.tokens[0].token_id if each.tokens else None for each in samples]

    return choose


def renamed(choose: Choose, ids: Tensor) -> Choose:
    """Return a function that chooses among the tokens of a head. ids: their ids in the model, int64 [head's tokens]."""
    names = ids.tolist()

    def chosen(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
        return [None if each is None else names[each] for each in choose(logits, rows)]

    return chosen


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter works with, beside its model, whose `shape` this is."""

    builder: InputBatchBuilder
    sequences: Sequences
    choose: Choose
    shape: ModelShape


class Drafter:
    """Runs a draft model, or a head, over the known tokens, and then over its own guesses.

    Its keys and values lie in blocks beside the model's, so that what shares, moves or keeps those does it with them.
    Prompts are computed in the step that computes them. What is generated does not depend on a drafter, only how fast
    it comes. What is drawn while no guesses are wanted is caught up when they are wanted again, also behind a prefix
    hit, but by a head: that has no states for it.
    """

    def __init__(self, model: LanguageModel, parts: DrafterParts, *, is_head: bool = False) -> None:
        """is_head: at each position it reads a state, and the token behind it."""
        self.num_passes = 0
        """Forward passes so far."""
        self._model = model
        self._builder, self._tokens, self._choose = parts.builder, parts.sequences.tokens, parts.choose
        self._max_num_tokens = parts.builder.max_num_tokens
        self._max_positions, self._vocab_size = parts.shape.max_position_embeddings, parts.shape.vocab_size
        self._is_head = is_head
        self._lacking: set[int] = set()
        """Blocks that sequences have left, in which this model has not written all of their tokens."""

    def note_ended(self, state: SequenceState) -> None:
        """Note the blocks of an ended sequence that were computed while no guesses were wanted: others may find
        them."""
        if state.num_drafted is not None:
            self._note_lacking(state, state.num_drafted, state.num_tokens)

    def _note_lacking(self, state: SequenceState, first: int, end: int) -> None:
        if not self._is_head:
            self._lacking.update(self._blocks_of(state, first, end))

    def _blocks_of(self, state: SequenceState, first: int, end: int) -> list[int]:
        """Return the blocks that hold tokens [first, end) of a sequence, but a last one that is not full."""
        size = self._builder.block_size
        blocks = self._builder.leading_blocks(state.line, end // size)[first // size :]
        return [each for each in blocks if each]

    def _num_held(self, state: SequenceState, start: int) -> int:
        """Return how many of the first `start` tokens, which were found, this model has computed too."""
        if not self._lacking or self._is_head:
            return start
        size = self._builder.block_size
        blocks = self._builder.leading_blocks(state.line, -(-start // size))
        place = next((place for place, block in enumerate(blocks) if block in self._lacking), None)
        return start if place is None else place * size

    def extend(
        self, rows: Sequence[BatchRow], outputs: Sequence[RowOutput], states: Sequence[Tensor]
    ) -> list[RowOutput]:
        """Return the outputs, with guesses where the rows want them; the sequences know what was drawn already.

        states: the model's last hidden states of the step, or the streams that are noted, each [tokens, hidden].
        """
        places = [
            place
            for place, (row, state) in enumerate(rows)
            if row.num_proposals or row.start < state.num_prompt_tokens or row.num_tokens - len(row.drafts) > 1
        ]
        found = (self._span(place, rows[place], outputs[place]) for place in places)
        spans = [span for span in found if span is not None]
        if not spans:
            return list(outputs)
        hidden = self._compute(spans, rows, states)
        guesses = self._guess([span for span in spans if span.num_guesses], hidden)
        extended = list(outputs)
        for place, tokens in guesses.items():
            extended[place] = msgspec.structs.replace(extended[place], proposed=tuple(tokens))
        return extended

    def _span(self, place: int, row: BatchRow, output: RowOutput) -> Span | None:
        """Return the span of a row that computes more than its last token, or wants guesses; else None."""
        scheduled, state = row
        num_known_in_row = scheduled.num_tokens - len(scheduled.drafts)
        count = scheduled.num_proposals if output.tokens else 0
        if state.num_drafted is None:
            state.num_drafted = self._num_held(state, scheduled.start)
        if self._is_head:
            # the last position needs the token behind it
            first, end = scheduled.start, min(row.end, state.num_tokens - 1)
        else:
            first, end = state.num_drafted, state.num_tokens if count else scheduled.start + num_known_in_row
        is_decoding = num_known_in_row == 1 and scheduled.start >= state.num_prompt_tokens
        if not count and (is_decoding or not state.is_drafted):
            self._note_lacking(state, scheduled.start, end)
            return None
        if first >= end or end > self._max_positions:
            return None
        return Span(place, state, first, end, state.num_tokens, min(count, self._max_positions - end))

    def _compute(self, spans: Sequence[Span], rows: Sequence[BatchRow], states: Sequence[Tensor]) -> Tensor:
        """Compute the spans. Returns the hidden states [guessing, hidden] from which the first guesses follow."""
        starts = [0, *accumulate(row.scheduled.num_tokens for row in rows)]
        found = []
        for pieces in self._pieces(spans):
            read = None
            if self._is_head:
                offsets = [starts[span.place] - span.first for span, _, _ in pieces]
                indices = [
                    offset + at
                    for offset, (_, first, end) in zip(offsets, pieces, strict=True)
                    for at in range(first, end)
                ]
                index = torch.tensor(indices, device=states[0].device)
                read = torch.cat([each[index] for each in states], 1)
            hidden = self._pass([span.row(first, end) for span, first, end in pieces], read)
            ends = accumulate(end - first for _, first, end in pieces)
            last = [
                place - 1
                for place, (span, _, end) in zip(ends, pieces, strict=True)
                if end == span.end and span.num_guesses
            ]
            found.append(hidden[torch.tensor(last, dtype=torch.int64, device=hidden.device)])
        for span in spans:
            span.state.num_drafted = span.end
            if self._lacking:
                self._lacking.difference_update(self._blocks_of(span.state, span.first, span.end))
        return torch.cat(found)

    def _pieces(self, spans: Sequence[Span]) -> Iterator[list[_Piece]]:
        """Yield the pieces that one pass computes together."""
        pieces: list[_Piece] = []
        room = self._max_num_tokens
        for span in spans:
            first = span.first
            while first < span.end:
                end = min(span.end, first + room)
                pieces.append(_Piece(span, first, end))
                room -= end - first
                first = end
                if not room:
                    yield pieces
                    pieces, room = [], self._max_num_tokens
        if pieces:
            yield pieces

    def _guess(self, active: Sequence[Span], hidden: Tensor) -> dict[int, list[int]]:
        """Return the guesses by place, of which the first follow from `hidden`, [spans, hidden]."""
        guesses: dict[int, list[int]] = {span.place: [] for span in active}
        count = 0
        while active:
            rows = [SamplingRow(span.state, span.num_known + count, 1, count) for span in active]
            made = self._features(count, active, hidden)
            chosen = self._choices(made, rows, self._logits_of(count))
            pairs = [(number, token) for number, token in enumerate(chosen) if token is not None]
            for number, token in pairs:
                guesses[active[number].place].append(token)
            pairs = [(number, token) for number, token in pairs if active[number].num_guesses > count + 1]
            active = [active[number] for number, _ in pairs]
            if active:
                positions = [span.num_known + count for span in active]
                self._tokens.append([span.state.line for span in active], positions, [token for _, token in pairs])
                hidden = self._behind(active, positions, [number for number, _ in pairs], made, hidden)
            count += 1
        return guesses

    def _features(self, count: int, spans: Sequence[Span], hidden: Tensor) -> Tensor:
        """Return the features [spans, width] from which the logits of guess number `count` are computed."""
        return hidden

    def _logits_of(self, count: int) -> Callable[[Tensor], Tensor]:
        """Return the function that computes logits from rows of `_features`."""
        return self._model.compute_logits

    def _behind(
        self, spans: Sequence[Span], positions: Sequence[int], numbers: Sequence[int], made: Tensor, hidden: Tensor
    ) -> Tensor:
        """Return the states from which the next guesses follow, [spans, hidden].

        positions: of the last guesses. numbers: of the spans among those that the last features `made` are of.
        """
        read = hidden[torch.tensor(numbers, device=hidden.device)] if self._is_head else None
        places = [at - 1 if self._is_head else at for at in positions]
        return self._pass([span.row(at, at + 1) for span, at in zip(spans, places, strict=True)], read)

    def _choices(
        self, hidden: Tensor, rows: Sequence[SamplingRow], logits_of: Callable[[Tensor], Tensor] | None = None
    ) -> list[int | None]:
        """logits_of: makes logits of rows of `hidden`; None for the model's own."""
        chosen: list[int | None] = []
        for start, stop in chunks(len(rows), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            logits = (logits_of or self._model.compute_logits)(hidden[start:stop])
            chosen += self._choose(logits, rows[start:stop])
        return chosen

    def _pass(self, rows: Sequence[BatchRow], read: Tensor | None) -> Tensor:
        """Compute rows. read: for a head the state of each token, [tokens, width]."""
        self.num_passes += 1
        batch = self._builder.build(rows)
        if not self._is_head:
            # ids that no token has, as a model with more logits than tokens may draw them
            batch.token_ids.clamp_(max=self._vocab_size - 1)
        else:
            assert read is not None
            lines = np.array([row.state.line for row in rows for _ in range(row.scheduled.num_tokens)], dtype=np.int64)
            behind = [at + 1 for row in rows for at in range(row.scheduled.start, row.end)]
            token_ids = torch.empty(len(lines), dtype=torch.int64, device=batch.token_ids.device)
            self._tokens.gather(lines, np.array(behind, dtype=np.int64), out=token_ids)
            batch = replace(batch, token_ids=token_ids, received=IntermediateTensors(read, None))
        return self._model(batch)
