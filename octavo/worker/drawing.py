"""Makes the results of rows from the hidden states of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from octavo.core.outputs import RequestError
from octavo.core.step import PromptLogprobs, RowOutput, TokenLogprobs
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.metadata import RowSamples, SamplingRow, verified
from octavo.sampling.refusals import not_finite
from octavo.sampling.sampler import Sampler
from octavo.worker.batch.input_batch import BatchRow

LOGITS_BYTES = 64 << 20
"""Most float32 logits that are computed at once; a single row may exceed it."""


class RowResults(Protocol):
    """Makes the results of rows: draws tokens, or pools prompts."""

    def results(self, hidden: Tensor, rows: Sequence[BatchRow]) -> list[RowOutput]:
        """Return the results of the rows whose last hidden states are `hidden`, [tokens, hidden], in their order."""


class Drawing:
    """Computes logits where they are needed, and draws or describes tokens.

    `compute_logits` maps hidden states to float32 [rows, vocab].
    """

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], sampler: Sampler, vocab_size: int) -> None:
        self._compute_logits = compute_logits
        self._sampler = sampler
        self._vocab_size = vocab_size

    def results(self, hidden: Tensor, rows: Sequence[BatchRow]) -> list[RowOutput]:
        """Return the results of the rows whose last hidden states are `hidden`, [tokens, hidden], in their order."""
        prompt_logprobs = self._prompt_logprobs(hidden, rows)
        samples = self._sample(hidden, rows)
        return [output_of(row, samples.get(i), prompt_logprobs.get(i)) for i, row in enumerate(rows)]

    def _sample(self, hidden: Tensor, rows: Sequence[BatchRow]) -> dict[int, RowSamples]:
        """Return what is drawn by place in `rows`."""
        drawn: list[Position] = []
        ranked: list[Position] = []
        for found in positions_of(rows):
            (ranked if found.num_candidates else drawn).append(found)
        if not drawn and not ranked:
            return {}
        wanted = drawn + ranked
        if len(wanted) < len(hidden) or (drawn and ranked):
            tokens = torch.tensor([each.token for each in wanted], pin_memory=hidden.is_cuda)
            hidden = hidden[tokens.to(hidden.device, non_blocking=True)]
        if drawn and ranked:
            results = self._choose(hidden[: len(drawn)], drawn) + self._choose(hidden[len(drawn) :], ranked)
        else:
            results = self._choose(hidden, wanted)
        sampled = [each.place for each in wanted]
        if not any(each.row.num_drafts for each in drawn):
            return dict(zip(sampled, results, strict=True))
        by_row = groupby(zip(sampled, results, strict=True), key=itemgetter(0))
        return {place: verified(rows[place].scheduled.drafts, [each for _, each in group]) for place, group in by_row}

    def _choose(self, hidden: Tensor, wanted: Sequence[Position]) -> list[RowSamples]:
        """Draw a token at each position, or list the likeliest ones where the positions belong to beams."""
        results: list[RowSamples] = []
        for start, stop in chunks(len(wanted), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            logits = self._compute_logits(hidden[start:stop])
            rows = [each.row for each in wanted[start:stop]]
            if wanted[0].num_candidates:
                results += self._sampler.rank(logits, rows, [each.num_candidates for each in wanted[start:stop]])
            else:
                named = []
                for place, row in enumerate(rows):
                    if asked := row.sequence.params.logprob_token_ids:
                        named.append((place, self._named(logits[place], asked)))
                samples = self._sampler.sample(logits, rows)
                for place, tokens in named:
                    samples[place] = _with_named(samples[place], tokens)
                results += samples
            del logits  # the next piece takes its memory
        return results

    def _named(self, logits: Tensor, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Describe the tokens that a row's request names, by its logits [vocab], which sampling writes over."""
        parts = chunks(len(token_ids), rows_per_chunk(self._vocab_size, LOGITS_BYTES))
        return [
            token
            for start, stop in parts
            for token in self._sampler.describe(logits.expand(stop - start, -1), token_ids[start:stop], 0)
        ]

    def _prompt_logprobs(self, hidden: Tensor, rows: Sequence[BatchRow]) -> dict[int, _PromptResult]:
        """Return the log-probabilities of prompts by place in `rows`, for the rows that need them."""
        results = {}
        end = 0
        for place, row in enumerate(rows):
            first, end = end, end + row.scheduled.num_tokens
            count = row.scheduled.num_prompt_logprobs
            if count:
                results[place] = self._describe_prompt(hidden[first : first + count], row)
        return results

    def _describe_prompt(self, hidden: Tensor, row: BatchRow) -> _PromptResult:
        """Describe the tokens that follow the positions whose hidden states [positions, hidden] are given."""
        first = row.scheduled.start + 1
        following: list[int] = row.state.first_tokens(first + len(hidden))[first:].tolist()
        assert first + len(hidden) <= row.state.num_tokens, "prompt log-probabilities end with the known tokens"
        tokens: list[TokenLogprobs] = []
        for start, stop in chunks(len(hidden), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            logits = self._compute_logits(hidden[start:stop])
            tokens += self._sampler.describe(logits, following[start:stop], row.state.params.prompt_logprobs or 0)
            del logits  # the next piece takes its memory
        unsound = next((i for i, token in enumerate(tokens) if math.isnan(token.logprob or 0)), None)
        if unsound is not None:
            return _PromptResult(None, not_finite(first + unsound))
        return _PromptResult(PromptLogprobs(first_position=first, tokens=tokens))


def _with_named(drawn: RowSamples, named: Sequence[TokenLogprobs]) -> RowSamples:
    listed = {
        "top_ids": tuple(each.token_id for each in named),
        "top_logprobs": tuple(each.logprob for each in named),
        "ranks": tuple(each.rank for each in named),
    }
    tokens = [msgspec.structs.replace(token, **listed) for token in drawn.tokens]
    return msgspec.structs.replace(drawn, tokens=tokens)


class Position(NamedTuple):
    """A position whose next token is wanted, of the row at `place`; its hidden state is that of `token` in the step."""

    place: int
    token: int
    row: SamplingRow
    num_candidates: int


def sampling_rows(rows: Sequence[BatchRow]) -> Iterator[SamplingRow]:
    """Return the rows from which is drawn in the step that computes `rows`, those of a sequence one after the other."""
    return (found.row for found in positions_of(rows))


def positions_of(rows: Sequence[BatchRow]) -> Iterator[Position]:
    """Yield the positions whose next tokens are wanted, in the order of the rows."""
    end = 0
    for place, row in enumerate(rows):
        scheduled, state = row
        end += scheduled.num_tokens
        if scheduled.num_samples or scheduled.num_candidates:
            first = row.end - len(scheduled.drafts)
            assert first == state.num_tokens, "a row samples before all known tokens are computed"
            for position in range(first, row.end + 1):
                sampling_row = SamplingRow(state, position, scheduled.num_samples, position - first)
                yield Position(place, end - 1 + position - row.end, sampling_row, scheduled.num_candidates)


@dataclass(frozen=True, slots=True)
class _PromptResult:
    logprobs: PromptLogprobs | None
    error: RequestError | None = None


def output_of(row: BatchRow, sampled: RowSamples | None, prompt: _PromptResult | None) -> RowOutput:
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
        is_undrawn=sampled is not None and not sampled.tokens and sampled.candidates is None,
    )
