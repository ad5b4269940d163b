"""The sampler on compiled kernels: one call per step for all rows, without sorting a vocabulary.

The stages are the reference's; docs/design/sampling.md says where rounding may decide differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.devices.reference.sampler import ReferenceSampler, without_barred
from octavo.sampling.chunks import sampled_apart
from octavo.sampling.filters import Filter, default_filters
from octavo.sampling.logprobs import ranked_tokens
from octavo.sampling.metadata import RowSamples, SampledSequence, SamplingRow
from octavo.sampling.processors import LogitsProcessor, MaskingProcessor, ProcessedRow, default_processors
from octavo.sampling.refusals import refusal
from octavo.sampling.requests import FILTERS_IN_THE_CALL, IN_THE_CALL, REQUEST_BYTES, PackedRequest, address_of

if TYPE_CHECKING:
    from octavo import _native

_DRAWN, _NOT_FINITE, _ALL_BARRED, _OVERFLOW, _OUTSIDE_VOCABULARY = range(5)
"""SamplingStatus of csrc/cpu/sampling/sampling.h."""

_LARGEST_BY_STATUS = {_NOT_FINITE: (math.nan, math.nan), _ALL_BARRED: (0.0, -math.inf), _OVERFLOW: (0.0, math.inf)}


class NativeSampler:
    """A `Sampler` on the compiled library. `processors` act before those that are part of its call.

    Rows with a filter or a built-in processor that is not part of its call go through the reference, which applies all
    of them in their order.
    """

    def __init__(
        self, kernels: _native.Cpu, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()
    ) -> None:
        self._kernels = kernels
        built_in = default_processors()
        self._processors = [each for each in processors if not isinstance(each, IN_THE_CALL)]
        self._other_built_in = [each for each in built_in if not isinstance(each, IN_THE_CALL)]
        self._masking = next((each for each in processors if isinstance(each, MaskingProcessor)), None)
        all_filters = (*default_filters(), *filters)
        self._other_filters = [each for each in all_filters if not isinstance(each, FILTERS_IN_THE_CALL)]
        self._reference = ReferenceSampler((*processors, *built_in), all_filters)
        self._requests: WeakKeyDictionary[SampledSequence, PackedRequest] = WeakKeyDictionary()
        self._input = _Buffer()
        self._answer: _Answer | None = None
        self._scratch = _Buffer()

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        assert len(logits) == len(rows)
        if not rows:
            return []
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        requests = [self._request_of(row, vocab_size) for row in rows]
        are_for_reference = [request.is_for_reference for request in requests]
        if any(are_for_reference):
            return sampled_apart(logits, rows, are_for_reference, self._reference.sample, self.sample)
        processed = process(logits, rows, requests) if self._processors else {}
        packed = [request.packed(row) for request, row in zip(requests, rows, strict=True)]
        packed += [request.keys(row) for request, row in zip(requests, rows, strict=True)]
        num_draws = sum(row.num_samples for row in rows)
        answer = self._answer_of(num_rows, num_draws, sum(request.num_listed for request in requests))
        first_request = self._input.write(b"".join(packed))
        first_key = first_request + num_rows * REQUEST_BYTES
        scratch = self._scratch.reserve(self._kernels.sampling_scratch_bytes(num_rows, vocab_size))
        self._kernels.sample(
            logits.data_ptr(), num_rows, vocab_size, first_request, first_key, *answer.addresses, scratch
        )
        results = _results(rows, requests, answer.read())
        for row, before in processed.items():
            results[row] = self._of_processed(rows[row], results[row], before, logits[row])
        return results

    def rank(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        requests = [self._request_of(row, vocab_size) for row in rows]
        # a processor of another's making acts on log-probabilities too, and before the compiled ones
        others = [place for place, request in enumerate(requests) if request.processors or request.is_for_reference]
        ranked = self._reference.rank(logits[others], *_chosen(others, rows, counts)) if others else []
        packed = [request.packed(row) for request, row in zip(requests, rows, strict=True)]
        # the call changes the logits of the tokens whose scores the processors change
        before = {place: logits[place].clone() for place, each in enumerate(requests) if each.changes_scores}
        listed = min(max(counts), vocab_size)
        answer = self._answer_of(num_rows, 0, num_rows * listed)
        statuses, _, top_tokens, top_values = answer.addresses
        scratch = self._scratch.reserve(self._kernels.sampling_scratch_bytes(num_rows, vocab_size))
        first_request = self._input.write(b"".join(packed))
        self._kernels.rank_tokens(
            logits.data_ptr(), num_rows, vocab_size, first_request, listed, statuses, top_tokens, top_values, scratch
        )
        read = answer.read()
        results = []
        for place, (row, status) in enumerate(zip(rows, read.statuses, strict=True)):
            _check_vocabulary(status)
            if status != _DRAWN:
                error = refusal(row.position, row.sequence.params, *_LARGEST_BY_STATUS[status])
                results.append(RowSamples([], error))
                continue
            ids, scores = read.listed(place * listed, min(counts[place], listed))
            logprobs = scores.copy()
            changed = [i for i in requests[place].changed_places(ids) if scores[i] > -math.inf]
            if changed:
                for i, logprob in zip(changed, self._logprobs(before[place], [ids[i] for i in changed]), strict=True):
                    logprobs[i] = logprob
            results.append(RowSamples([], candidates=ranked_tokens(ids, scores, logprobs)))
        for place, result in zip(others, ranked, strict=True):
            results[place] = result
        return results

    def describe(self, logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
        listed = min(num_logprobs, logits.shape[1])
        read = self._describe(logits, token_ids, listed)
        results = []
        for row, status in enumerate(read.statuses):
            _check_vocabulary(status)
            token = read.described(row, row * listed, listed)
            results.append(token if status == _DRAWN else TokenLogprobs(token_id=token.token_id, logprob=math.nan))
        return results

    def describe_drawn(
        self, logits: Tensor, rows: Sequence[SamplingRow], drawn: Sequence[list[int]]
    ) -> list[list[TokenLogprobs]]:
        # the stages are the reference's, a row at a time, which stays in the cache; the kernel describes it
        results = []
        for place, (row, token_ids) in enumerate(zip(rows, drawn, strict=True)):
            values = logits[place : place + 1]
            self._reference.leave_drawable(values, [row])
            count = row.sequence.params.logprobs or 0
            described = self.describe(values.expand(len(token_ids), -1), token_ids, count) if token_ids else []
            results.append([without_barred(token) for token in described])
        return results

    def _logprobs(self, logits: Tensor, token_ids: Sequence[int]) -> list[float]:
        """Return log-probabilities of tokens of one row, float32 [vocab], counted from that of the likeliest one."""
        (row,) = self.describe(logits.unsqueeze(0), [0], 1)
        values = logits[[*row.top_ids, *token_ids]].double()
        logprobs: list[float] = (values[1:] - values[0] + row.top_logprobs[0]).float().tolist()
        return logprobs

    def _describe(self, logits: Tensor, token_ids: Sequence[int], listed: int) -> _Read:
        """`listed` tokens of each row lie one after the other."""
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        answer = self._answer_of(num_rows, num_rows, num_rows * listed)
        answer.tokens[:] = token_ids
        scratch = self._scratch.reserve(self._kernels.sampling_scratch_bytes(num_rows, vocab_size))
        self._kernels.describe_tokens(logits.data_ptr(), num_rows, vocab_size, listed, *answer.addresses, scratch)
        return answer.read()

    def _request_of(self, row: SamplingRow, vocab_size: int) -> PackedRequest:
        sequence = row.sequence
        request = self._requests.get(sequence)
        if request is None:
            processors = tuple(each for each in self._processors if each.needs(sequence.params))
            is_filtered = any(each.needs(sequence.params) for each in self._other_filters)
            others = self._other_built_in
            is_processed = bool(others) and any(each.needs(sequence.params) for each in others)
            is_masked = self._masking is not None and self._masking.needs(sequence.params)
            masks = self._masking if is_masked else None
            request = self._requests[sequence] = PackedRequest(
                sequence,
                vocab_size,
                processors,
                masks=masks,
                is_for_reference=is_processed or (is_filtered and not sequence.params.is_greedy),
            )
        return request.for_row(row)

    def _answer_of(self, num_rows: int, num_draws: int, num_listed: int) -> _Answer:
        # one decode step is like the last
        if self._answer is None or self._answer.sizes != (num_rows, num_draws, num_listed):
            self._answer = _Answer(num_rows, num_draws, num_listed)
        return self._answer

    def _of_processed(self, row: SamplingRow, result: RowSamples, before: Tensor, after: Tensor) -> RowSamples:
        """Return the result with what depends on the logits before the processors: log-probabilities and errors."""
        params = row.sequence.params
        # a processor may have written over what was no number
        largest = float(after.amax()) if result.error is not None else 0.0
        error = refusal(row.position, params, float(before.amax()), largest)
        if error is not None:
            return RowSamples([], error)
        if not params.needs_logprobs:
            return result
        token_ids = [token.token_id for token in result.tokens]
        return RowSamples(self.describe(before.expand(len(token_ids), -1), token_ids, params.logprobs or 0))


def process(logits: Tensor, rows: Sequence[SamplingRow], requests: Sequence[PackedRequest]) -> dict[int, Tensor]:
    """Apply the processors of the requests to `logits`; returns copies of the changed rows [vocab] from before."""
    processors = dict.fromkeys(each for request in requests for each in request.processors)
    before = {place: logits[place].clone() for place, request in enumerate(requests) if request.processors}
    for processor in processors:
        wanting = [
            ProcessedRow(place, row) for place, row in enumerate(rows) if processor in requests[place].processors
        ]
        processor.update(wanting)
        processor.apply(logits)
    return before


def _results(rows: Sequence[SamplingRow], requests: Sequence[PackedRequest], read: _Read) -> list[RowSamples]:
    results = []
    draw = first_listed = 0
    for row, request, status in zip(rows, requests, read.statuses, strict=True):
        if status != _DRAWN:
            _check_vocabulary(status)
            error = refusal(row.position, row.sequence.params, *_LARGEST_BY_STATUS[status])
            results.append(RowSamples([], error))
        elif request.lists_logprobs:
            draws = range(draw, draw + row.num_samples)
            results.append(RowSamples([read.described(each, first_listed, request.num_listed) for each in draws]))
        else:
            token_ids = read.tokens[draw : draw + row.num_samples]
            results.append(RowSamples([TokenLogprobs(token_id=token_id) for token_id in token_ids]))
        draw += row.num_samples
        first_listed += request.num_listed
    return results


def _chosen(
    places: list[int], rows: Sequence[SamplingRow], counts: Sequence[int]
) -> tuple[list[SamplingRow], list[int]]:
    return [rows[place] for place in places], [counts[place] for place in places]


def _check_vocabulary(status: int) -> None:
    if status == _OUTSIDE_VOCABULARY:
        raise IndexError("a token id lies outside the vocabulary of the logits")


class _Answer:
    """The memory that a call writes: statuses [rows], draws [draws, 3], ids of listed tokens, their
    log-probabilities."""

    def __init__(self, num_rows: int, num_draws: int, num_listed: int) -> None:
        self.sizes = (num_rows, num_draws, num_listed)
        draws, top_ids = num_rows, num_rows + 3 * num_draws
        top_logprobs = top_ids + num_listed
        self._starts = (draws, top_ids, top_logprobs)
        self._words = np.empty(top_logprobs + num_listed, dtype=np.int32)
        first = address_of(self._words)
        self.addresses = (first, first + 4 * draws, first + 4 * top_ids, first + 4 * top_logprobs)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[draws]: given to the call, or drawn by it."""
        return self._words[self._starts[0] : self._starts[1] : 3]

    def read(self) -> _Read:
        return _Read(self._words, *self._starts)


class _Read:
    """The results of a call as Python's numbers."""

    def __init__(self, words: NDArray[np.int32], draws: int, top_ids: int, top_logprobs: int) -> None:
        numbers = words[:top_ids].tolist()
        self.statuses: list[int] = numbers[:draws]
        self.tokens: list[int] = numbers[draws::3]
        self._ranks: list[int] = numbers[draws + 1 :: 3]
        floats = words.view(np.float32)
        self._logprobs = floats[draws + 2 : top_ids : 3]
        self._top_ids = words[top_ids:top_logprobs]
        self._top_logprobs = floats[top_logprobs:]

    def described(self, draw: int, first_listed: int, num_listed: int) -> TokenLogprobs:
        """Return draw number `draw`, with `num_listed` likeliest tokens."""
        top_ids, top_logprobs = self.listed(first_listed, num_listed)
        return TokenLogprobs(
            token_id=self.tokens[draw],
            logprob=float(self._logprobs[draw]),
            rank=self._ranks[draw],
            top_ids=tuple(top_ids),
            top_logprobs=tuple(top_logprobs),
        )

    def listed(self, first: int, count: int) -> tuple[list[int], list[float]]:
        """Return ids and log-probabilities of listed tokens."""
        return self._top_ids[first : first + count].tolist(), self._top_logprobs[first : first + count].tolist()


class _Buffer:
    """Bytes at one address, which changes only when more are reserved than before."""

    def __init__(self) -> None:
        self.array: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._address = 0

    def reserve(self, num_bytes: int) -> int:
        """Return the address of at least so many bytes."""
        if num_bytes > len(self.array):
            self.array = np.empty(num_bytes, dtype=np.uint8)
            self._address = address_of(self.array)
        return self._address

    def write(self, data: bytes) -> int:
        """Return the address of a copy."""
        address = self.reserve(len(data))
        self.array.data[: len(data)] = data
        return address
