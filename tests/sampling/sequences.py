"""A sequence as the sampler sees it, without a worker around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.devices.token_store import HostTokenStore
from octavo.sampling.metadata import SamplingRow

_STORE, _LINES = HostTokenStore(), count()


@dataclass(eq=False)
class FakeSequence:
    """`prompt` and `output` may grow between steps; `drafts` stand behind them."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    index: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    drafts: list[int] = field(default_factory=list)

    own_line: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def line(self) -> int:
        """A line that has its tokens as they are now; few tests need one."""
        self.own_line = next(_LINES) if self.own_line is None else self.own_line
        _STORE.write(self.own_line, 0, self.prompt + self.output + self.drafts)
        return self.own_line

    def stored_tokens(self) -> Tensor:
        return _STORE.on_device()

    def first_tokens(self, count: int) -> NDArray[np.int32]:
        return np.array((self.prompt + self.output + self.drafts)[:count], dtype=np.int32)

    def row(self, num_samples: int = 1) -> SamplingRow:
        """The row from which the next token is drawn."""
        return SamplingRow(self, len(self.prompt) + len(self.output), num_samples)

    def rows(self) -> list[SamplingRow]:
        """The rows from which the next token and those after each draft are drawn."""
        known = len(self.prompt) + len(self.output)
        return [SamplingRow(self, known + count, 1, count) for count in range(len(self.drafts) + 1)]


def sampling_row(
    *, num_samples: int = 1, index: int = 0, prompt: tuple[int, ...] = (1, 2, 3), **params: Any
) -> SamplingRow:
    """A row with a prompt of a few tokens and these sampling parameters."""
    params.setdefault("seed", 0)
    return FakeSequence(SamplingParams(**params), list(prompt), index=index).row(num_samples)
