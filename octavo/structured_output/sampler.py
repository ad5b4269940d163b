"""Sampling of sequences whose text has a form: not before its grammar is compiled, and not after it has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.sampling.metadata import RowSamples, SamplingRow
from octavo.sampling.sampler import Sampler
from octavo.structured_output.processor import GrammarProcessor


class GuidedSampler:
    """A `Sampler` around that of a device, which has `processor` among its own.

    A row whose grammar is being compiled, or whose mask takes too long, gets a result without tokens; its last token is
    computed again in a later step. So no step waits for a grammar.
    """

    def __init__(self, sampler: Sampler, processor: GrammarProcessor) -> None:
        self._sampler = sampler
        self._processor = processor

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        return self._among_ready(rows, lambda places: self._sampler.sample(*_chosen(places, logits, rows)))

    def rank(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        def rank(places: Sequence[int]) -> list[RowSamples]:
            return self._sampler.rank(*_chosen(places, logits, rows), [counts[place] for place in places])

        return self._among_ready(rows, rank)

    def describe(self, logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
        return self._sampler.describe(logits, token_ids, num_logprobs)

    def _among_ready(
        self, rows: Sequence[SamplingRow], sample: Callable[[Sequence[int]], list[RowSamples]]
    ) -> list[RowSamples]:
        """Return the results of `sample` for the places of rows from which can be drawn, and those of the others."""
        if not self._processor.is_used:
            return sample(range(len(rows)))
        self._processor.start(rows)  # as a rule, it was begun before the forward pass
        self._processor.wait(rows)
        results: dict[int, RowSamples] = {}
        for place, row in enumerate(rows):
            sequence = row.sequence
            if not self._processor.needs(sequence.params):
                continue
            if not self._processor.begin(sequence):
                results[place] = RowSamples([])
            elif (error := self._processor.failure(sequence)) is not None:
                results[place] = RowSamples([], error)
            elif not self._processor.is_ready(row):
                results[place] = RowSamples([])
        ready = [place for place in range(len(rows)) if place not in results]
        results.update(zip(ready, sample(ready) if ready else (), strict=True))
        masked = [place for place in ready if self._processor.needs(rows[place].sequence.params)]
        for sequence in {rows[place].sequence for place in masked}:
            first = self._processor.failed_at(sequence)
            if first is not None:
                # what was drawn without a mask is not of the form
                error = self._processor.recover(sequence)
                behind = (place for place in masked if rows[place].sequence is sequence)
                results.update((place, RowSamples([], error)) for place in behind if rows[place].position >= first)
        return [results[place] for place in range(len(rows))]


def _chosen(places: Sequence[int], logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Sequence[SamplingRow]]:
    if len(places) == len(rows):
        return logits, rows
    return logits[list(places)], [rows[place] for place in places]
