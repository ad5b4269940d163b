"""The protocol between the model runner and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.sampling.metadata import RowSamples, SampledSequence, SamplingRow


class Sampler(Protocol):
    """Draws tokens from logits and describes them. A row's result depends on that row alone."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        """Draw for each of `rows` from its row of `logits`, float32 [rows, vocab], which is overwritten.

        A row whose logits are not numbers, or whose tokens are all barred, gets an error; the others are not affected.
        """

    def rank(self, logits: Tensor, rows: Sequence[SamplingRow], counts: Sequence[int]) -> list[RowSamples]:
        """For beam search, return, instead of drawing, the `counts[i]` tokens with the largest values, as `candidates`.

        The values are the `scores` of the candidates: log-probabilities on which the processors have acted, as in
        transformers. They are not normalised again, and -inf is a barred token, whose id means nothing. Beside them
        stand the model's own log-probabilities. float32 logits [rows, vocab], which are overwritten.
        """

    def describe(self, logits: Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
        """Return log-probability and rank of one given token in each row of `logits`, float32 [rows, vocab].

        With the `num_logprobs` likeliest tokens there. The log-probability is NaN where logits are not numbers.
        """


class DescribingSampler(Sampler, Protocol):
    """The sampler of a device."""

    def describe_drawn(
        self, logits: Tensor, rows: Sequence[SamplingRow], drawn: Sequence[list[int]]
    ) -> list[list[TokenLogprobs]]:
        """Describe the tokens that `sample` drew for each of `rows` by the distribution from which it drew them.

        The distribution is that behind processors, temperature and filters; of greedy rows, behind processors. Tokens
        that cannot be drawn are not among the likeliest. logits, float32 [rows, vocab], are as before `sample`, and are
        overwritten.
        """


class LaunchedDraws(NamedTuple):
    """Tokens that are drawn on a device beside the host. token_ids: int64 [draws] there. wait: returns the results."""

    token_ids: Tensor
    wait: Callable[[], list[RowSamples]]


class DrawnTokens(NamedTuple):
    """Drawn tokens of rows. The token of a row whose place is in `errors` has no meaning."""

    token_ids: list[int]
    errors: dict[int, RequestError]


class DrawPlan(NamedTuple):
    """The numbers with which a device draws for rows. kind: the launches that are needed. asked: float64
    [rows, numbers], of which the last column is the caller's."""

    kind: int
    asked: NDArray[np.float64]


@runtime_checkable
class RepeatableSampler(Protocol):
    """Draws without waiting for the device, where the draw needs nothing that the host learns later. Its launches can
    be captured and repeated with other numbers."""

    def may_launch(self, params: SamplingParams) -> bool:
        """Return whether `launch` can draw for a request with these parameters."""

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> LaunchedDraws:
        """Draw for each of `rows` as `Sampler.sample` does. The device needs nothing more of the host."""

    def plan(self, sequences: Sequence[SampledSequence], positions: Sequence[int]) -> DrawPlan | None:
        """Return the plan of drawing token `positions[i]` of sequence i; None if that needs more than logits."""

    def draw(self, logits: Tensor, kind: int, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Draw, with `asked` of the plan on the device. Return the tokens, int64 [rows], and the argument of `read`."""

    def read(
        self, told: Tensor, sequences: Sequence[SampledSequence], positions: Sequence[int]
    ) -> Callable[[], DrawnTokens]:
        """Begin to copy the drawn tokens to the host, and return a function that waits for them."""
