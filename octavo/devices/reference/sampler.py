"""The sampler in plain torch: the definition of each stage, and the sampler of devices without compiled kernels.

Stages: log-probabilities of the model's own distribution → processors → greedy choice, or temperature → filters → draw.
A row's result depends on its logits, its sequence and its key; the other rows of the batch change no bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.filters import HISTOGRAM_BYTES, Filter, default_filters, filtered, filtered_probabilities, scale
from octavo.sampling.logprobs import ranked_tokens, token_logprobs
from octavo.sampling.metadata import RowSamples, SampledSequence, SamplingRow
from octavo.sampling.processors import LogitsProcessor, ProcessedRow, default_processors
from octavo.sampling.random import draw_key, race, race_among
from octavo.sampling.refusals import refusal
from octavo.sampling.top_tokens import DECIDED_BY_TOP_TOKENS, TopTokens, filtered_top_tokens

CHUNK_BYTES = 2 << 20
"""Logits that are sampled at a time: small enough to stay in cache, and a bound on the memory that sampling takes."""

PEAK_FACTOR = 28
"""Most bytes alive while a chunk is sampled, in multiples of its logits; a test guards it."""


Describer = Callable[[Sequence[int], Sequence[int], Sequence[int | None]], list[TokenLogprobs]]
"""Describes a token of each of the rows given, which do not fall, with as many likeliest ones as are wanted."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """Which stages a sequence's parameters need; looked up once per sequence."""

    is_greedy: bool
    is_described: bool
    processors: tuple[LogitsProcessor, ...]
    filters: tuple[Filter, ...]

    @property
    def may_be_decided(self) -> bool:
        return all(isinstance(each, DECIDED_BY_TOP_TOKENS) for each in self.filters)


class ReferenceSampler:
    """A `Sampler`: draws the tokens of a step. `chunk_bytes` bounds the logits that are worked on at once."""

    def __init__(
        self,
        processors: Sequence[LogitsProcessor] | None = None,
        filters: Sequence[Filter] | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._processors = default_processors() if processors is None else tuple(processors)
        self._filters = default_filters() if filters is None else tuple(filters)
        self._chunk_bytes = chunk_bytes
        self._traits: WeakKeyDictionary[SampledSequence, _Traits] = WeakKeyDictionary()

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        assert len(logits) == len(rows)
        results: list[RowSamples] = []
        for start, end in chunks(len(rows), rows_per_chunk(logits.shape[1], self._chunk_bytes)):
            results += self._sample_chunk(logits[start:end], rows[start:end])
        return results

    def describe(self, logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
        results: list[TokenLogprobs] = []
        for start, end in chunks(len(logits), rows_per_chunk(logits.shape[1], self._chunk_bytes)):
            wanted = [num_logprobs] * (end - start)
            results += self._describer(logits[start:end])(range(end - start), token_ids[start:end], wanted)
        return results

    def describe_drawn(
        self, logits: Tensor, rows: Sequence[SamplingRow], drawn: Sequence[list[int]]
    ) -> list[list[TokenLogprobs]]:
        results: list[list[TokenLogprobs]] = []
        for start, end in chunks(len(rows), rows_per_chunk(logits.shape[1], self._chunk_bytes)):
            values, of_chunk = logits[start:end], rows[start:end]
            self.leave_drawable(values, of_chunk)
            places = list(range(end - start))
            found = _describe(self._describer(values), places, of_chunk, drawn[start:end])
            results += [[without_barred(token) for token in each] for each in found]
        return results

    def leave_drawable(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Change `logits` [rows, vocab] to those of the distributions from which rows draw: -inf for other tokens."""
        self._change(logits, rows)
        random = [place for place, row in enumerate(rows) if not row.sequence.params.is_greedy]
        if random:
            params = [rows[place].sequence.params for place in random]
            scaled = scale(logits[random], [each.temperature for each in params])
            traits = [self._traits_of(rows[place].sequence) for place in random]
            logits[random] = self._kept(scaled, params, traits) if any(each.filters for each in traits) else scaled

    def _kept(self, scaled: Tensor, params: Sequence[SamplingParams], traits: Sequence[_Traits]) -> Tensor:
        """Return `scaled` with -inf for what the filters drop: of most rows all but the likeliest tokens."""
        top = filtered_top_tokens(scaled, params)
        are_decided = [a and b.may_be_decided for a, b in zip(top.is_decided, traits, strict=True)]
        wide = [place for place, is_decided in enumerate(are_decided) if not is_decided]
        kept = torch.full_like(scaled, -math.inf)
        likeliest = scaled.gather(1, top.token_ids).masked_fill_(top.weights == 0.0, -math.inf)
        kept.scatter_(1, top.token_ids, likeliest)
        if wide:
            kept[wide] = filtered(scaled[wide], [params[place] for place in wide], self._filters)
        return kept

    def _describer(self, logits: Tensor) -> Describer:
        """Return what describes tokens by logits, float32 [rows, vocab], as they are now."""
        return partial(token_logprobs, torch.log_softmax(logits, dim=-1))

    def rank(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        # the processors act on log-probabilities, which are not normalised again: so do those of transformers
        logprobs = torch.log_softmax(logits, dim=-1)
        scores = logprobs.clone()
        errors = self._process(scores, rows, may_bar_all=True)
        results = []
        for row, count in enumerate(counts):
            # row by row: which of tied tokens come first must not depend on what the neighbours asked for
            top = torch.topk(scores[row], min(count, scores.shape[1]))
            found = ranked_tokens(top.indices.tolist(), top.values.tolist(), logprobs[row, top.indices].tolist())
            results.append(RowSamples([], errors.get(row), None if row in errors else found))
        return results

    def _sample_chunk(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        traits = [self._traits_of(row.sequence) for row in rows]
        described = [row for row, each in enumerate(traits) if each.is_described]
        describe = self._describer(_rows(logits, described)) if described else None
        errors = self._process(logits, rows)
        draws = self._draw(logits, rows, traits, errors)
        tokens = [[TokenLogprobs(token_id=token_id) for token_id in each] for each in draws]
        if describe is not None:
            for row, each in zip(described, _describe(describe, described, rows, draws), strict=True):
                tokens[row] = each
        return [RowSamples(each, errors.get(row)) for row, each in enumerate(tokens)]

    def _traits_of(self, sequence: SampledSequence) -> _Traits:
        traits = self._traits.get(sequence)
        if traits is None:
            params = sequence.params
            processors = tuple(each for each in self._processors if each.needs(params))
            filters = tuple(each for each in self._filters if each.needs(params))
            traits = self._traits[sequence] = _Traits(params.is_greedy, params.needs_logprobs, processors, filters)
        return traits

    def _process(
        self, logits: Tensor, rows: Sequence[SamplingRow], *, may_bar_all: bool = False
    ) -> dict[int, RequestError]:
        """Apply the processors to `logits` [rows, vocab]; returns the errors of rows from which nothing can be drawn.

        may_bar_all: a row of numbers whose tokens are all barred is no error.
        """
        traits = [self._traits_of(row.sequence) for row in rows]
        model_largest: list[float] = logits.amax(dim=-1).tolist()
        largest = model_largest
        if any(each.processors for each in traits):
            self._change(logits, rows)
            largest = logits.amax(dim=-1).tolist()
        errors = {}
        for place, row in enumerate(rows):
            if may_bar_all and largest[place] == -math.inf and math.isfinite(model_largest[place]):
                continue
            error = refusal(row.position, row.sequence.params, model_largest[place], largest[place])
            if error is not None:
                errors[place] = error
        return errors

    def _change(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Let each processor change the logits of the rows that need it."""
        traits = [self._traits_of(row.sequence) for row in rows]
        for processor in self._processors:
            wanting = [ProcessedRow(row, rows[row]) for row, each in enumerate(traits) if processor in each.processors]
            if wanting:
                self._apply(processor, wanting, logits)

    def _apply(self, processor: LogitsProcessor, rows: Sequence[ProcessedRow], logits: Tensor) -> None:
        processor.update(rows)
        processor.apply(logits)

    def _draw(
        self, logits: Tensor, rows: Sequence[SamplingRow], traits: Sequence[_Traits], errors: dict[int, RequestError]
    ) -> list[list[int]]:
        """Return the token ids drawn for each row: `num_samples` of them, none for a row with an error."""
        draws: list[list[int]] = [[] for _ in rows]
        sound = [row for row in range(len(rows)) if row not in errors]
        greedy = [row for row in sound if traits[row].is_greedy]
        if greedy:
            likeliest = _argmax(_rows(logits, greedy)).tolist()
            for row, token_id in zip(greedy, likeliest, strict=True):
                draws[row] = [token_id] * rows[row].num_samples
        for has_filters in (False, True):
            chosen = [row for row in sound if not traits[row].is_greedy and bool(traits[row].filters) is has_filters]
            if chosen:
                drawn = self._draw_random(_rows(logits, chosen), [rows[row] for row in chosen], has_filters=has_filters)
                for row, token_ids in zip(chosen, drawn, strict=True):
                    draws[row] = token_ids
        return draws

    def _draw_random(self, logits: Tensor, rows: Sequence[SamplingRow], *, has_filters: bool) -> list[list[int]]:
        """Draw `num_samples` tokens for each row of `logits` [rows, vocab]."""
        params = [row.sequence.params for row in rows]
        scaled = scale(logits, [each.temperature for each in params])
        if not has_filters:
            return self._draw_each(torch.softmax(scaled, dim=-1), rows, sparse=False)
        drawn: list[list[int]] = [[] for _ in rows]
        top = filtered_top_tokens(scaled, params)
        decided = [
            place
            for place, row in enumerate(rows)
            if top.is_decided[place] and self._traits_of(row.sequence).may_be_decided
        ]
        if decided:
            part = TopTokens(top.token_ids[decided], top.weights[decided], [True] * len(decided))
            for row, token_ids in zip(decided, self._draw_each(part, [rows[row] for row in decided]), strict=True):
                drawn[row] = token_ids
        wide = sorted(set(range(len(rows))) - set(decided))
        del top
        if wide:
            scaled = _rows(scaled, wide)
            probabilities = filtered_probabilities(scaled, [params[row] for row in wide], self._filters)
            del scaled
            found = self._draw_each(probabilities, [rows[row] for row in wide], sparse=True)
            for row, token_ids in zip(wide, found, strict=True):
                drawn[row] = token_ids
        return drawn

    def _draw_each(
        self, source: Tensor | TopTokens, rows: Sequence[SamplingRow], *, sparse: bool = False
    ) -> list[list[int]]:
        """Return token ids per row, drawn from probabilities, or from what can be drawn of the likeliest tokens."""
        keys = np.array([key for row in rows for key in keys_of(row)], dtype=np.uint32)
        owners = np.repeat(np.arange(len(rows)), [row.num_samples for row in rows])
        drawn: list[list[int]] = [[] for _ in rows]
        # as many draws at a time as there are rows: what memory holds for the rows, it holds for these
        for start, end in chunks(len(owners), len(rows)):
            part, their = owners[start:end], keys[start:end]
            if isinstance(source, Tensor):
                token_ids = race(_of_owners(source, part), their, sparse=sparse)
            else:
                token_ids = race_among(_of_owners(source.token_ids, part), _of_owners(source.weights, part), their)
            for owner, token_id in zip(part.tolist(), token_ids.tolist(), strict=True):
                drawn[owner].append(token_id)
        return drawn


def reference_bytes(num_rows: int, vocab_size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the most bytes that `ReferenceSampler.sample` allocates for that many rows of logits."""
    return min(num_rows, rows_per_chunk(vocab_size, chunk_bytes)) * (PEAK_FACTOR * 4 * vocab_size + HISTOGRAM_BYTES)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _describe(
    describe: Describer, described: list[int], rows: Sequence[SamplingRow], draws: Sequence[list[int]]
) -> list[list[TokenLogprobs]]:
    """Return the draws of the `described` rows, which are those that `describe` has."""
    owners = [place for place, row in enumerate(described) for _ in draws[row]]
    token_ids = [token_id for row in described for token_id in draws[row]]
    if not token_ids:
        return [[] for _ in described]
    wanted = [rows[described[place]].sequence.params.logprobs for place in owners]
    tokens = iter(describe(owners, token_ids, wanted))
    return [[next(tokens) for _ in draws[row]] for row in described]


def without_barred(token: TokenLogprobs) -> TokenLogprobs:
    """Leave out those of the likeliest tokens that cannot be drawn."""
    count = sum(each > -math.inf for each in token.top_logprobs)
    if count == len(token.top_logprobs):
        return token
    return replace(token, top_ids=token.top_ids[:count], top_logprobs=token.top_logprobs[:count])


def _of_owners(values: Tensor, owners: NDArray[np.int64]) -> NDArray[Any]:
    """Return the rows of the draws, where the reference generator reads them: numpy shares the memory of the CPU."""
    array: NDArray[Any] = values.cpu().numpy()
    return array if np.array_equal(owners, np.arange(len(array))) else array[owners]


def keys_of(row: SamplingRow) -> Iterator[tuple[int, int]]:
    """Yield the keys of a row's draws."""
    sequence = row.sequence
    indices = (sequence.index,) if row.num_samples == 1 else range(row.num_samples)
    return (draw_key(sequence.params.seed or 0, index, row.position) for index in indices)


def _argmax(logits: Tensor) -> Tensor:
    """Return the first index of the largest logit in each row, int64 [rows]."""
    if logits.device.type == "cpu":
        # numpy's is ten times as fast on a CPU
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=-1)
