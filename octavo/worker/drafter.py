"""Guesses the tokens behind those that a step has drawn, with a second model over cache groups of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from octavo.core.step import RowOutput, ScheduledSequence
from octavo.devices.device import LanguageModel
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.sampler import Sampler
from octavo.worker.drawing import LOGITS_BYTES
from octavo.worker.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.sequence_state import Sequences, SequenceState

Choose = Callable[[Tensor, Sequence[SamplingRow]], Sequence[int | None]]
"""Returns a token for each row of logits, float32 [rows, vocab]; None for a row that gets none."""


class Drafter(Protocol):
    """Guesses behind the rows of a step. What is generated does not depend on it, only how fast it comes."""

    num_passes: int
    """Forward passes so far."""

    def extend(self, rows: Sequence[BatchRow], outputs: Sequence[RowOutput], hidden: Tensor) -> list[RowOutput]:
        """Return the outputs, with guesses where the rows want them; the sequences know what was drawn already.

        hidden: the model's last hidden states of the step, [tokens, hidden].
        """
        ...


class Span(NamedTuple):
    """Tokens [first, end) of a sequence, which the draft model has to compute before it makes `num_guesses`.

    place: of its row in the step.
    """

    place: int
    state: SequenceState
    first: int
    end: int
    num_guesses: int

    def row(self, first: int, end: int) -> BatchRow:
        """Return the row that computes tokens [first, end)."""
        return BatchRow(ScheduledSequence(self.state.seq_id, self.state.epoch, first, end - first, 0), self.state)


def greedy(vocab_size: int) -> Choose:
    """Return what chooses the likeliest of the first `vocab_size` tokens."""
    return lambda logits, rows: logits[:, :vocab_size].argmax(-1).tolist()


def drawn_with(sampler: Sampler) -> Choose:
    """Return what draws with the sampling parameters and the key that the model's token at that position has."""

    def choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
        samples = sampler.sample(logits, rows)
        return [each.tokens[0].token_id if each.tokens else None for each in samples]

    return choose


class ModelDrafter:
    """Runs a draft model over the known tokens, and then over its own guesses.

    Its keys and values lie in blocks beside the model's, so that what shares, moves or keeps those does it with them.
    Prompts are computed in the step that computes them. What is drawn while no guesses are wanted is caught up when
    they are wanted again.
    """

    def __init__(
        self,
        model: LanguageModel,
        builder: InputBatchBuilder,
        sequences: Sequences,
        choose: Choose,
        *,
        max_num_tokens: int,
        max_positions: int,
        vocab_size: int,
    ) -> None:
        """max_num_tokens: of a forward pass. max_positions, vocab_size: of the draft model."""
        self.num_passes = 0
        self._model = model
        self._builder = builder
        self._tokens = sequences.tokens
        self._choose = choose
        self._max_num_tokens = max_num_tokens
        self._max_positions = max_positions
        self._vocab_size = vocab_size

    def extend(self, rows: Sequence[BatchRow], outputs: Sequence[RowOutput], hidden: Tensor) -> list[RowOutput]:
        """Return the outputs, with guesses where the rows want them; `hidden` is not read."""
        each_span = (
            self._span(place, row, output) for place, (row, output) in enumerate(zip(rows, outputs, strict=True))
        )
        spans = [span for span in each_span if span is not None]
        if not spans:
            return list(outputs)
        guesses = self._guess([span for span in spans if span.num_guesses], self._compute(spans))
        extended = list(outputs)
        for place, tokens in guesses.items():
            extended[place] = msgspec.structs.replace(extended[place], proposed=tuple(tokens))
        return extended

    def _span(self, place: int, row: BatchRow, output: RowOutput) -> Span | None:
        """Return what is to be computed for a row; None for nothing."""
        scheduled, state = row
        num_known = scheduled.num_tokens - len(scheduled.drafts)
        count = scheduled.num_proposals if output.tokens else 0
        end = state.num_tokens if count else scheduled.start + num_known
        if state.num_drafted is None:
            state.num_drafted = scheduled.start
        first, is_decoding = state.num_drafted, num_known == 1 and scheduled.start >= state.num_prompt_tokens
        if (is_decoding and not count) or first >= end or end > self._max_positions:
            return None
        return Span(place, state, first, end, min(count, self._max_positions - end))

    def _compute(self, spans: Sequence[Span]) -> Tensor:
        """Compute the spans. Returns the hidden states [guessing, hidden] from which the first guesses follow."""
        found = []
        for batch in self._batches(spans):
            hidden = self._pass([span.row(first, end) for span, first, end in batch])
            ends = accumulate(end - first for _, first, end in batch)
            places = [
                place - 1
                for place, (span, _, end) in zip(ends, batch, strict=True)
                if end == span.end and span.num_guesses
            ]
            found.append(hidden[torch.tensor(places, dtype=torch.int64, device=hidden.device)])
        for span in spans:
            span.state.num_drafted = span.end
        return torch.cat(found)

    def _batches(self, spans: Sequence[Span]) -> Iterator[list[tuple[Span, int, int]]]:
        """Yield pieces (span, first, end) that one pass computes together."""
        batch: list[tuple[Span, int, int]] = []
        room = self._max_num_tokens
        for span in spans:
            first = span.first
            while first < span.end:
                end = min(span.end, first + room)
                batch.append((span, first, end))
                room -= end - first
                first = end
                if not room:
                    yield batch
                    batch, room = [], self._max_num_tokens
        if batch:
            yield batch

    def _guess(self, active: Sequence[Span], hidden: Tensor) -> dict[int, list[int]]:
        """Return the guesses by place, of which the first follow from `hidden`, [spans, hidden]."""
        guesses: dict[int, list[int]] = {span.place: [] for span in active}
        count = 0
        while active:
            chosen = self._choices(hidden, [SamplingRow(span.state, span.end + count, 1, count) for span in active])
            pairs = [(span, token) for span, token in zip(active, chosen, strict=True) if token is not None]
            for span, token in pairs:
                guesses[span.place].append(token)
            pairs = [(span, token) for span, token in pairs if span.num_guesses > count + 1]
            active = [span for span, _ in pairs]
            if active:
                positions = [span.end + count for span in active]
                self._tokens.append([span.state.line for span in active], positions, [token for _, token in pairs])
                hidden = self._pass([span.row(at, at + 1) for span, at in zip(active, positions, strict=True)])
            count += 1
        return guesses

    def _choices(self, hidden: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
        chosen: list[int | None] = []
        for start, stop in chunks(len(rows), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            chosen += self._choose(self._model.compute_logits(hidden[start:stop]), rows[start:stop])
        return chosen

    def _pass(self, rows: Sequence[BatchRow]) -> Tensor:
        self.num_passes += 1
        return self._model(self._builder.build(rows))
