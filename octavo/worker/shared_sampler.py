"""Samples tokens when each rank has the logits of a share of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.distributed.mesh import Mesh
from octavo.layers.embedding import VocabularyShare
from octavo.sampling.chunks import chunks
from octavo.sampling.metadata import RowSamples, SampledSequence, SamplingRow
from octavo.sampling.processors import LogitsProcessor, default_processors
from octavo.sampling.sampler import Sampler

_MOST_CANDIDATES: Final = 128
"""Most tokens that a row may be drawn from (top-k) to be sampled from each rank's likeliest tokens alone."""

_TIES: Final = 8
"""Additional candidates of a share, for tokens that tie with the last needed one."""

_ROWS_AT_ONCE: Final = 16
"""Rows that rank 0 samples at once from candidates."""

_FAILED: Final = -1
"""Sent in place of each token of a row from which rank 0 could draw none."""
_UNDRAWN: Final = -2
"""Sent in place of each token of a row that is drawn later."""


def shared_sampling_bytes(num_rows: int, vocab_size: int, mesh: Mesh) -> int:
    """Return the most bytes that sharing takes for this many rows, besides the sampler's and those of the logits."""
    if mesh.tensor.size == 1:
        return 0
    room = VocabularyShare.of(vocab_size, mesh).room * mesh.tensor.size
    copies = 1 if room == vocab_size else 2
    return 4 * (copies * room * num_rows + vocab_size * _ROWS_AT_ONCE)


def shared(sampler: Sampler, mesh: Mesh, vocab_size: int, processors: Sequence[LogitsProcessor | None] = ()) -> Sampler:
    """Return the sampler for a rank's share of the logits: `sampler` itself where there are no other tensor ranks.

    processors: those that it has beside the default ones and grammars.
    """
    return sampler if mesh.tensor.size == 1 else SharedSampler(sampler, mesh, vocab_size, processors)


def logits_of_all(share: Tensor, mesh: Mesh, vocab_size: int) -> Tensor:
    """Return the logits of all tensor ranks, [rows, vocab], on each of them. share: those of this one, [rows, room]."""
    return mesh.gather(share)[:, :vocab_size].contiguous()


class SharedSampler:
    """A `Sampler` of one tensor rank, to which `logits` are those of its share of the vocabulary, [rows, room].

    All ranks make the same calls. For greedy rows with unchanged logits each rank finds its likeliest token, and all
    ranks take the first of the largest. Rank 0 samples other rows with the device's sampler. A row with unchanged
    logits that draws from few tokens needs only the likeliest tokens of each share: rank 0 sees all other logits as
    -inf, which changes no bit of the draw. Logits of other rows are gathered. The results of the other ranks have the
    drawn tokens without their log-probabilities.
    """

    def __init__(
        self, sampler: Sampler, mesh: Mesh, vocab_size: int, processors: Sequence[LogitsProcessor | None]
    ) -> None:
        self._sampler = sampler
        self._mesh = mesh
        self._share = VocabularyShare.of(vocab_size, mesh)
        self._processors = [*filter(None, processors), *default_processors()]
        self._counts: WeakKeyDictionary[SampledSequence, int] = WeakKeyDictionary()
        self._others: Tensor | None = None

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        counts = [self._num_candidates(row.sequence) for row in rows]
        greedy = [place for place, row in enumerate(rows) if counts[place] and row.sequence.params.is_greedy]
        found = self._likeliest(logits, rows, greedy) if greedy else {}
        if len(found) == len(rows):
            return [found[place] for place in range(len(rows))]
        rest = [place for place in range(len(rows)) if place not in found]
        # a remaining greedy row has logits that are NaN
        counts = [0 if rows[place].sequence.params.is_greedy else counts[place] for place in rest]
        left = logits[rest] if found else logits
        found.update(zip(rest, self._draw(left, [rows[place] for place in rest], counts), strict=True))
        return [found[place] for place in range(len(rows))]

    def _draw(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        """Draw on rank 0, and send the tokens to the others. counts: the most tokens that each row draws from; 0 for
        all."""
        narrow = [place for place, count in enumerate(counts) if count]
        candidates = self._candidates(logits, narrow, [counts[place] for place in narrow]) if narrow else None
        few = set(candidates.places) if candidates else set()
        whole = [place for place in range(len(rows)) if place not in few]
        gathered = self._gather(logits, whole) if whole else logits
        drawn: list[int] = []
        results: list[RowSamples] = []
        if self._mesh.tensor.rank == 0:
            found = self._sample_among(candidates, rows) if candidates else {}
            if whole:
                sampled = self._sampler.sample(gathered, [rows[place] for place in whole])
                found.update(zip(whole, sampled, strict=True))
            results = [found[place] for place in range(len(rows))]
            for row, result in zip(rows, results, strict=True):
                if result.tokens:
                    drawn += [token.token_id for token in result.tokens]
                else:
                    drawn += [_UNDRAWN if result.error is None else _FAILED] * row.num_samples
        drawn = self._broadcast(drawn, sum(row.num_samples for row in rows), logits.device)
        return results or _received(rows, drawn)

    def _likeliest(self, logits: Tensor, rows: Sequence[SamplingRow], places: list[int]) -> dict[int, RowSamples]:
        """Return the tokens of greedy rows by place, the same on every rank: the first of the largest logits.

        Rows are left out, the same on every rank, where a share has logits that are not numbers.
        """
        length, wanted = self._share.length, [rows[place] for place in places]
        own = [(0.0, -math.inf)] * len(places)
        if length:
            logits = (logits if len(places) == len(logits) else logits[places])[:, :length]
            # logits of greedy rows are not overwritten
            sampled = self._sampler.sample(logits, wanted)
            token_ids = [each.tokens[0].token_id if each.tokens else 0 for each in sampled]
            values = logits.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))[:, 0].tolist()
            own = [
                (self._share.start + token_id, value if each.tokens else math.nan)
                for token_id, value, each in zip(token_ids, values, sampled, strict=True)
            ]
        gathered: list[list[float]] = self._mesh.gather(
            torch.tensor(own, dtype=torch.float64, device=logits.device)
        ).tolist()
        results = {}
        for place, row, shares in zip(places, wanted, gathered, strict=True):
            if not any(map(math.isnan, shares)):
                _, token_id = max(zip(shares[1::2], shares[::2], strict=True), key=itemgetter(0))
                results[place] = RowSamples([TokenLogprobs(token_id=int(token_id))] * row.num_samples)
        return results

    def rank(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        gathered = self._gather(logits, range(len(rows)))
        if self._mesh.tensor.rank == 0:
            return self._sampler.rank(gathered, rows, counts)
        return [RowSamples([]) for _ in rows]

    def describe(self, logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
        gathered = self._gather(logits, range(len(token_ids)))
        results: list[TokenLogprobs] = []
        if self._mesh.tensor.rank == 0:
            results = self._sampler.describe(gathered, token_ids, num_logprobs)
        unsound = [int(math.isnan(token.logprob or 0)) for token in results]
        unsound = self._broadcast(unsound, len(token_ids), logits.device)
        return results or [
            TokenLogprobs(token_id=token_id, logprob=math.nan if is_unsound else 0.0)
            for token_id, is_unsound in zip(token_ids, unsound, strict=True)
        ]

    def _num_candidates(self, sequence: SampledSequence) -> int:
        """Return the most tokens from which the sequence draws; 0 where all logits are needed."""
        count = self._counts.get(sequence)
        if count is None:
            params = sequence.params
            is_guided = params.structured_outputs is not None
            is_changed = is_guided or params.needs_logprobs or any(each.needs(params) for each in self._processors)
            count = self._counts[sequence] = 0 if is_changed else _most_drawn(params)
        return count

    def _gather(self, logits: Tensor, places: Sequence[int]) -> Tensor:
        """Return the logits of these rows over the whole vocabulary, on every rank."""
        own = logits if len(places) == len(logits) else logits[list(places)]
        return logits_of_all(own, self._mesh, self._share.total)

    def _candidates(self, logits: Tensor, places: list[int], counts: list[int]) -> _Candidates:
        """Return the candidates from which the rows at these places can be drawn.

        Rows are left out, the same on every rank, where a share has more ties than fit, or is no row of numbers.
        """
        listed = max(counts) + _TIES
        found = self._mesh.gather(self._own_candidates(logits, places, counts, listed))
        shares = found.view(len(places), self._mesh.tensor.size, 1 + 2 * listed)
        is_few = (shares[:, :, 0] == 0).all(1)
        shares = shares[is_few]
        token_ids, values = shares[:, :, 1 : 1 + listed].flatten(1), shares[:, :, 1 + listed :].flatten(1)
        few = [place for place, each in zip(places, is_few.tolist(), strict=True) if each]
        return _Candidates(few, token_ids.long(), values.view(torch.float32))

    def _own_candidates(self, logits: Tensor, places: list[int], counts: list[int], listed: int) -> Tensor:
        """Return int32 [rows, 1 + 2 listed]: 1 for a row that needs all logits, token ids or -1, the bits of logits."""
        length, num_rows = self._share.length, len(places)
        found = torch.full((num_rows, 1 + 2 * listed), -1, dtype=torch.int32, device=logits.device)
        found[:, 0] = 0
        if not length:
            return found
        own = (logits if num_rows == len(logits) else logits[places])[:, :length]
        num_found = min(listed, length)
        described = self._sampler.describe(own, [0] * num_rows, num_found)
        ids = torch.tensor([each.top_ids or [0] * num_found for each in described], device=logits.device)
        values = own.gather(1, ids)
        last = torch.tensor([[min(count, length) - 1] for count in counts], device=logits.device)
        needs_all = torch.tensor([math.isnan(each.logprob or 0) for each in described], device=logits.device)
        if num_found < length:
            needs_all |= values[:, -1] == values.gather(1, last)[:, 0]
        found[:, 0] = needs_all
        found[:, 1 : 1 + num_found] = ids + self._share.start
        found[:, 1 + listed : 1 + listed + num_found] = values.view(torch.int32)
        return found

    def _sample_among(self, candidates: _Candidates, rows: Sequence[SamplingRow]) -> dict[int, RowSamples]:
        """Sample rows from their candidates alone; returns the results by place."""
        results: dict[int, RowSamples] = {}
        device = candidates.token_ids.device
        for first, end in chunks(len(candidates.places), _ROWS_AT_ONCE):
            if self._others is None:
                self._others = torch.full((_ROWS_AT_ONCE, self._share.total), -math.inf, device=device)
            places, logits = candidates.places[first:end], self._others[: end - first]
            row, column = (candidates.token_ids[first:end] >= 0).nonzero(as_tuple=True)
            token_ids = candidates.token_ids[first + row, column]
            logits[row, token_ids] = candidates.logits[first + row, column]
            results.update(zip(places, self._sampler.sample(logits, [rows[place] for place in places]), strict=True))
            logits[row, token_ids] = -math.inf
        return results

    def _broadcast(self, numbers: list[int], count: int, device: torch.device) -> list[int]:
        """Return the `count` numbers of rank 0."""
        tensor = torch.tensor(numbers or [0] * count, dtype=torch.int64, device=device)
        self._mesh.broadcast(tensor)
        received: list[int] = tensor.tolist()
        return received


class _Candidates(NamedTuple):
    """The tokens that rows at `places` can be drawn from, each [rows, listed]; an id of -1 is none."""

    places: list[int]
    token_ids: Tensor
    logits: Tensor


def _most_drawn(params: SamplingParams) -> int:
    """Return the most tokens from which a row of unchanged logits draws; 0 for all, or too many."""
    if params.is_greedy:
        return 1
    return params.top_k if 0 < params.top_k <= _MOST_CANDIDATES else 0


def _received(rows: Sequence[SamplingRow], drawn: list[int]) -> list[RowSamples]:
    """Return results of rows with the tokens that rank 0 drew."""
    results, end = [], 0
    for row in rows:
        start, end = end, end + row.num_samples
        if _FAILED in drawn[start:end]:
            results.append(RowSamples([], RequestError("rank 0 could draw no token")))
        elif _UNDRAWN in drawn[start:end]:
            results.append(RowSamples([]))
        else:
            results.append(RowSamples([TokenLogprobs(token_id=token_id) for token_id in drawn[start:end]]))
    return results
