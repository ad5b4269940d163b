"""Log-probabilities of the distributions from which tokens are drawn, in place of the model's own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from octavo.sampling.metadata import RowSamples, SamplingRow
from octavo.sampling.sampler import DescribingSampler


class ProcessedLogprobs:
    """A `Sampler` that draws as another one does and describes what it drew by `describe_drawn`.

    Beams and prompts keep the log-probabilities of the model: nothing is drawn there.
    """

    def __init__(self, sampler: DescribingSampler) -> None:
        self._sampler = sampler
        self.rank, self.describe = sampler.rank, sampler.describe

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        places = [place for place, row in enumerate(rows) if row.sequence.params.needs_logprobs]
        if not places:
            return self._sampler.sample(logits, rows)
        before = logits[places]  # a copy
        results = self._sampler.sample(logits, rows)
        drawn = [[token.token_id for token in results[place].tokens] for place in places]
        described = self._sampler.describe_drawn(before, [rows[place] for place in places], drawn)
        for place, tokens in zip(places, described, strict=True):
            results[place] = msgspec.structs.replace(results[place], tokens=tokens)
        return results
