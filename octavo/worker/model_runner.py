"""Executes steps on a device: updates the states of sequences, runs the model and draws tokens. Dummy batches take the
same path."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from octavo.attention.metadata import NotedStates
from octavo.core.step import ModelRunnerOutput, RowOutput, SchedulerOutput
from octavo.devices.device import LanguageModel
from octavo.sampling.sampler import Sampler
from octavo.structured_output.processor import GrammarProcessor
from octavo.worker.batch.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.drafting.drafter import Drafter
from octavo.worker.drawing import Drawing, RowResults, sampling_rows
from octavo.worker.prompt_encodings import CrossEncodings, PromptEncodings


@dataclass(frozen=True, kw_only=True)
class RunnerParts:
    """The parts with which a runner computes steps."""

    model: LanguageModel
    cache: CacheEngine
    sequences: Sequences
    builder: InputBatchBuilder
    vocab_size: int
    sampler: Sampler | None
    """Draws; None where tokens come with the steps."""
    pooler: RowResults | None = None
    """Makes vectors of prompts; no tokens are drawn then."""
    grammars: GrammarProcessor | None = None
    """The sampler's grammars, where it draws; compiling those of new sequences begins before the model runs."""
    launches_logprobs: bool = True
    """Whether a device may describe tokens that it draws without waiting for the host."""
    suggests: bool = False
    """Whether results have the tokens that grammars force next."""
    drafter: Drafter | None = None
    """Guesses the next tokens, for rows that request it."""
    encodings: CrossEncodings | PromptEncodings | None = None
    """Encodes images and sounds of prompts; None for models that read text only."""
    padded: Callable[[int], int] | None = None
    """Returns the number of rows, the same on all ranks, to which a decode step is padded; None for no padding."""


class ModelRunner:
    """Executes steps in their order."""

    def __init__(self, parts: RunnerParts) -> None:
        self.parts = parts
        self.model, self.cache, self.sequences = parts.model, parts.cache, parts.sequences
        self.drawing = parts.pooler
        """Makes the results of rows from the hidden states of a step; None where tokens come with the steps."""
        if parts.pooler is None and parts.sampler is not None:
            # the model may be replaced by one that measures its calls
            self.drawing = Drawing(lambda hidden: self.model.compute_logits(hidden), parts.sampler, parts.vocab_size)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the step's changes, compute its rows, and append what is drawn to the sequences."""
        self._update_sequences(step)
        swap_s = self.cache.apply(step.block_ops)
        if not step.rows:
            return ModelRunnerOutput(step_id=step.step_id, rows=[], swap_s=swap_s)
        rows, parts = self._rows(step), self.parts
        grammars = parts.grammars if parts.grammars is not None and parts.grammars.is_used else None
        if grammars is not None:
            grammars.start(sampling_rows(rows))
        unfinished = self.sequences.unfinished_media
        encoded = ((), None) if parts.encodings is None else parts.encodings.read(rows, unfinished)
        num_padding_rows = self._num_padding_rows(rows)
        batch = parts.builder.build(rows, *encoded, num_padding_rows=num_padding_rows)
        result = self.model(batch)
        hidden, *states = (result.hidden, *result.streams) if isinstance(result, NotedStates) else (result, result)
        if num_padding_rows and self.drawing is not None:
            hidden, *states = (each[: len(rows)] for each in (hidden, *states))
        outputs: list[RowOutput] = []
        has_guesses = False
        if self.drawing is not None:
            outputs = self.drawing.results(hidden, rows)
            self._append(rows, outputs)
            if parts.suggests and grammars is not None:
                outputs = [_with_forced(grammars, row, output) for row, output in zip(rows, outputs, strict=True)]
                has_guesses = any(output.forced for output in outputs)
        done = ModelRunnerOutput(step_id=step.step_id, rows=outputs, swap_s=swap_s, has_guesses=has_guesses)
        return done if parts.drafter is None else _with_guesses(parts.drafter, done, rows, states)

    def _append(self, rows: Sequence[BatchRow], outputs: Sequence[RowOutput]) -> None:
        """Store the drawn tokens. Of several samples the first belongs to the sequence; the others come back as
        forks."""
        lines, positions, token_ids = [], [], []
        for row, output in zip(rows, outputs, strict=True):
            if not row.scheduled.num_samples or output.is_undrawn:
                continue
            state = row.state
            # drafts that were right are stored already
            num_right = len(output.tokens) - 1 if row.scheduled.drafts and output.tokens else 0
            lines.append(state.line)
            positions.append(state.num_tokens + num_right)
            # steps that are planned already compute the token that an error has prevented
            token_ids.append(output.tokens[num_right].token_id if output.tokens else 0)
            state.num_tokens += num_right + 1
        if lines:
            self.sequences.tokens.append(lines, positions, token_ids)

    def _update_sequences(self, step: SchedulerOutput) -> None:
        drafter, grammars = self.parts.drafter, self.parts.grammars
        if drafter is not None:
            for seq_id in step.finished_ids:
                if seq_id in self.sequences:
                    drafter.note_ended(self.sequences[seq_id])
        for new in step.new_sequences:
            self.sequences.add(new)
            if new.params.structured_outputs is not None and grammars is not None:
                grammars.begin(self.sequences[new.seq_id])
        if step.finished_ids:
            stay = {new.seq_id for new in step.new_sequences}
            for seq_id in step.finished_ids:
                if seq_id not in stay:
                    self.sequences.drop(seq_id)

    def _num_padding_rows(self, rows: Sequence[BatchRow]) -> int:
        """Return how many copies of its first row pad a decode step to a size for which a launch was captured."""
        padded = self.parts.padded
        if padded is None or any(row.scheduled.num_tokens != 1 for row in rows):
            return 0
        return min(padded(len(rows)), self.parts.builder.max_num_tokens) - len(rows)

    def _rows(self, step: SchedulerOutput) -> list[BatchRow]:
        rows, tokens = [], self.sequences.tokens
        for scheduled in step.rows:
            state = self.sequences[scheduled.seq_id]
            assert state.epoch == scheduled.epoch, "a row was planned for another life of its sequence"
            end = scheduled.start + scheduled.num_tokens - len(scheduled.drafts)
            if scheduled.token_ids:
                tokens.write(state.line, end - len(scheduled.token_ids), scheduled.token_ids)
                state.num_tokens = end
            if scheduled.drafts:
                tokens.write(state.line, end, scheduled.drafts)
            assert end <= state.num_tokens, "a row computes unknown tokens"
            for change in scheduled.table_changes:
                self.sequences.tables[change.group].write(state.line, change.first_index, change.block_ids)
            rows.append(BatchRow(scheduled, state))
        return rows


def _with_guesses(
    drafter: Drafter, done: ModelRunnerOutput, rows: Sequence[BatchRow], states: Sequence[Tensor]
) -> ModelRunnerOutput:
    num_passes, began = drafter.num_passes, time.perf_counter()
    outputs = drafter.extend(rows, done.rows, states)
    num_passes = drafter.num_passes - num_passes
    if not num_passes:
        return done
    draft_s = time.perf_counter() - began
    has_guesses = done.has_guesses or any(output.proposed for output in outputs)
    return msgspec.structs.replace(
        done, rows=outputs, has_guesses=has_guesses, draft_s=draft_s, num_draft_passes=num_passes
    )


def _with_forced(grammars: GrammarProcessor, row: BatchRow, output: RowOutput) -> RowOutput:
    state = row.state
    if not output.tokens or row.scheduled.num_samples != 1 or state.params.structured_outputs is None:
        return output
    forced = grammars.forced(state, state.num_tokens)
    return msgspec.structs.replace(output, forced=forced) if forced else output
