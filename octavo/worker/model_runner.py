"""One step on the device: bring the states up to date, run the model, sample. Real and dummy batches take this path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.core.outputs import RequestError
from octavo.core.step import (
    ModelRunnerOutput,
    PromptLogprobs,
    RowOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.metadata import RowSamples, SamplingRow
from octavo.sampling.refusals import not_finite
from octavo.sampling.sampler import Sampler
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.sequence_state import Sequences
from octavo.worker.token_store import TokenStore

LOGITS_BYTES = 64 << 20
"""Most float32 logits that are computed at once; a single row may exceed it."""


class LanguageModel(Protocol):
    """What the runner asks of a model."""

    def __call__(self, batch: ModelInput) -> Tensor:
        """Last hidden states [tokens, hidden]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab]."""
        ...


class ModelRunner:
    """Carries out steps in the order in which they come."""

    def __init__(
        self,
        model: LanguageModel,
        cache: CacheEngine,
        *,
        vocab_size: int,
        block_size: int,
        max_num_tokens: int,
        device: torch.device,
        sampler: Sampler | None = None,
        tokens: TokenStore | None = None,
    ) -> None:
        self.sequences = Sequences(tokens)
        self.model = model
        self._cache = cache
        self._vocab_size = vocab_size
        self._sampler = sampler or ReferenceSampler()
        self._builder = InputBatchBuilder(
            cache.caches,
            self.sequences.tokens,
            self.sequences.tables,
            block_size=block_size,
            max_num_tokens=max_num_tokens,
            device=device,
        )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Take the step's changes in, compute its rows, and append what is drawn to the sequences."""
        self._update_sequences(step)
        swap_s = self._cache.apply(step.block_ops)
        if not step.rows:
            return ModelRunnerOutput(step_id=step.step_id, rows=[], swap_s=swap_s)
        rows = self._rows(step)
        batch = self._builder.build(rows)
        hidden = self.model(batch)  # [tokens, hidden]
        prompt_logprobs = self._prompt_logprobs(hidden, rows)
        samples = self._sample(hidden, rows)
        outputs = [_output(row, samples.get(i), prompt_logprobs.get(i)) for i, row in enumerate(rows)]
        self._append(rows, outputs)
        return ModelRunnerOutput(step_id=step.step_id, rows=outputs, swap_s=swap_s)

    def _append(self, rows: Sequence[BatchRow], outputs: Sequence[RowOutput]) -> None:
        """Store what was drawn. Of several samples the first is the sequence's own; the others come back as forks."""
        lines, positions, token_ids = [], [], []
        for row, output in zip(rows, outputs, strict=True):
            if not row.scheduled.num_samples:
                continue
            state = row.state
            lines.append(state.line)
            positions.append(state.num_tokens)
            # steps that are planned already compute the token that an error has prevented
            token_ids.append(output.tokens[0].token_id if output.tokens else 0)
            state.num_tokens += 1
        if lines:
            self.sequences.tokens.append(np.array(lines), np.array(positions), token_ids)

    def release_memory(self, empty_blocks: Sequence[int]) -> None:
        """Give back the memory of KV blocks whose content nobody needs."""
        self._cache.release(empty_blocks)

    def _update_sequences(self, step: SchedulerOutput) -> None:
        for new in step.new_sequences:
            self.sequences.add(new)
        if step.finished_ids:
            stay = {new.seq_id for new in step.new_sequences}
            for seq_id in step.finished_ids:
                if seq_id not in stay:
                    self.sequences.drop(seq_id)

    def _rows(self, step: SchedulerOutput) -> list[BatchRow]:
        rows = []
        for scheduled in step.rows:
            state = self.sequences[scheduled.seq_id]
            assert state.epoch == scheduled.epoch, "a row was planned for another life of its sequence"
            end = scheduled.start + scheduled.num_tokens
            if scheduled.token_ids:
                self.sequences.tokens.write(state.line, end - len(scheduled.token_ids), scheduled.token_ids)
                state.num_tokens = end
            assert end <= state.num_tokens, "a row computes unknown tokens"
            for change in scheduled.table_changes:
                self.sequences.tables.write(state.line, change.first_index, change.block_ids)
            rows.append(BatchRow(scheduled, state))
        return rows

    def _sample(self, hidden: Tensor, rows: Sequence[BatchRow]) -> dict[int, RowSamples]:
        """What is drawn, by place in `rows`."""
        sampled: list[int] = []
        last_tokens: list[int] = []
        end = 0
        for place, row in enumerate(rows):
            end += row.scheduled.num_tokens
            if row.scheduled.num_samples or row.scheduled.num_candidates:
                assert row.end == row.state.num_tokens, "a row samples before all known tokens are computed"
                sampled.append(place)
                last_tokens.append(end - 1)
        if not sampled:
            return {}
        if len(sampled) < len(hidden):
            hidden = hidden[torch.tensor(last_tokens, device=hidden.device)]
        sampling_rows = [
            SamplingRow(rows[place].state, rows[place].end, rows[place].scheduled.num_samples) for place in sampled
        ]
        results: list[RowSamples] = []
        for start, stop in chunks(len(sampled), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            logits = self.model.compute_logits(hidden[start:stop])
            counts = [rows[place].scheduled.num_candidates for place in sampled[start:stop]]
            results += self._choose(logits, sampling_rows[start:stop], counts)
        return dict(zip(sampled, results, strict=True))

    def _choose(self, logits: Tensor, rows: list[SamplingRow], counts: list[int]) -> list[RowSamples]:
        """Draw for the rows; those with a count, which belong to beams, get their likeliest tokens instead."""
        if not any(counts):
            return self._sampler.sample(logits, rows)
        if all(counts):
            return self._sampler.rank(logits, rows, counts)
        beams = [i for i, count in enumerate(counts) if count]
        others = [i for i, count in enumerate(counts) if not count]
        ranked = self._sampler.rank(logits[beams], [rows[i] for i in beams], [counts[i] for i in beams])
        results = dict(zip(beams, ranked, strict=True))
        if others:
            results.update(zip(others, self._sampler.sample(logits[others], [rows[i] for i in others]), strict=True))
        return [results[i] for i in range(len(rows))]

    def _prompt_logprobs(self, hidden: Tensor, rows: Sequence[BatchRow]) -> dict[int, _PromptResult]:
        """What the rows that ask for it get, by place in `rows`."""
        results = {}
        end = 0
        for place, row in enumerate(rows):
            first, end = end, end + row.scheduled.num_tokens
            count = row.scheduled.num_prompt_logprobs
            if count:
                results[place] = self._describe_prompt(hidden[first : first + count], row)
        return results

    def _describe_prompt(self, hidden: Tensor, row: BatchRow) -> _PromptResult:
        """The tokens that follow the positions whose hidden states [positions, hidden] these are."""
        first = row.scheduled.start + 1
        following: list[int] = row.state.first_tokens(first + len(hidden))[first:].tolist()
        assert first + len(hidden) <= row.state.num_tokens, "prompt log-probabilities end with the known tokens"
        tokens: list[TokenLogprobs] = []
        for start, stop in chunks(len(hidden), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            logits = self.model.compute_logits(hidden[start:stop])
            tokens += self._sampler.describe(logits, following[start:stop], row.state.params.prompt_logprobs or 0)
        unsound = next((i for i, token in enumerate(tokens) if math.isnan(token.logprob or 0)), None)
        if unsound is not None:
            return _PromptResult(None, not_finite(first + unsound))
        return _PromptResult(PromptLogprobs(first_position=first, tokens=tokens))


@dataclass(frozen=True, slots=True)
class _PromptResult:
    logprobs: PromptLogprobs | None
    error: RequestError | None = None


def _output(row: BatchRow, sampled: RowSamples | None, prompt: _PromptResult | None) -> RowOutput:
    """Return the row's results for the control plane; an error stays with its sequence."""
    state = row.state
    error = state.error or (prompt and prompt.error) or (sampled and sampled.error) or None
    if error is not None:
        state.error = error
        return RowOutput(state.seq_id, state.epoch, [], error=error)
    return RowOutput(
        state.seq_id,
        state.epoch,
        sampled.tokens if sampled is not None else [],
        prompt.logprobs if prompt is not None else None,
        candidates=sampled.candidates if sampled is not None else None,
    )
