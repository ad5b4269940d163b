"""A sequence as the sampler sees it, without a worker around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.metadata import SamplingRow


@dataclass(eq=False)
class FakeSequence:
    """`prompt` and `output` may grow between steps."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    index: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def known_tokens(self) -> NDArray[np.int64]:
        return np.array(self.prompt + self.output, dtype=np.int64)


def sampling_row(
    *, num_samples: int = 1, index: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **params: Any
) -> SamplingRow:
    """A row with a prompt of a few tokens and these sampling parameters."""
    params.setdefault("seed", 0)
    return SamplingRow(FakeSequence(SamplingParams(**params), list(prompt), index=index), num_samples)
