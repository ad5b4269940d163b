"""Bars the tokens that the grammar of a request does not admit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.sampling.metadata import SampledSequence, SamplingRow
from octavo.sampling.processors import ProcessedRow
from octavo.structured_output.matchers import Matchers

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class _State:
    """The matcher of a sequence and the output tokens that it has taken.

    is_first: no mask was computed by the matcher yet, and no other sequence has it.
    failed_at: the position of the first row whose mask could not be computed.
    """

    compiled: Future[LLMatcher]
    is_first: bool = False
    matcher: LLMatcher | None = None
    taken: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    failed_at: int | None = None


class GrammarProcessor:
    """A `MaskingProcessor` of the sequences that have a form.

    What it keeps follows from the tokens of a sequence: before a mask is computed, the matcher takes what is new and
    gives back what is not there any more. So no preemption, fork or draft can part the two.
    """

    name = "structured_outputs"

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._states: WeakKeyDictionary[SampledSequence, _State] = WeakKeyDictionary()
        self._rows: Sequence[ProcessedRow] = ()
        self.is_used = False
        """Whether any sequence has had a form."""

    def needs(self, params: SamplingParams) -> bool:
        return params.structured_outputs is not None

    def begin(self, sequence: SampledSequence) -> bool:
        """Return whether the sequence's grammar is compiled, which begins at the first call. Never waits."""
        self.is_used = True
        return self._state(sequence).compiled.done()

    def failure(self, sequence: SampledSequence) -> RequestError | None:
        """Return why the sequence's grammar, which is compiled, cannot be used; None when it can."""
        error = self._state(sequence).compiled.exception()
        if isinstance(error, InvalidRequest):
            return RequestError(str(error), field=error.field, code=error.code, is_client_error=True)
        if error is not None:
            return RequestError(f"the grammar could not be compiled: {error}", field="structured_outputs")
        return None

    def failed_at(self, sequence: SampledSequence) -> int | None:
        """Return the first position of the sequence whose mask could not be computed; None when all could."""
        return self._state(sequence).failed_at

    def recover(self, sequence: SampledSequence) -> RequestError | None:
        """Begin to compile the grammar once more after a mask of a sequence has failed.

        Returns the error instead where a new matcher fails at the known tokens, too. So whether a request fails
        depends on its tokens, and not on what others have done to the tables that they share.
        """
        state = self._states.pop(sequence)
        matcher, wanted = state.matcher, sequence.params.structured_outputs
        assert matcher is not None
        assert wanted is not None
        if state.is_first:
            reason = matcher.get_error() or "its tokens are not of the form"
            return RequestError(
                f"the grammar takes too much work here: {reason:.200}; simplify it",
                field="structured_outputs",
                code="invalid_grammar",
                is_client_error=True,
            )
        self._states[sequence] = _State(self._matchers.compile_anew(wanted, state.compiled), is_first=True)
        return None

    def mask(self, row: SamplingRow) -> NDArray[np.uint32] | None:
        """Return the tokens that may be drawn, a bit for each; None for all, behind a draft that may not be there, and
        where the mask has failed."""
        state = self._state(row.sequence)
        matcher = state.matcher
        if matcher is None:
            matcher = state.matcher = state.compiled.result().deep_copy()
        output = row.tokens[row.sequence.num_prompt_tokens :]
        same = _num_alike(state.taken, output)
        if same < len(state.taken):
            matcher.rollback(len(state.taken) - same)
        num_taken = same + matcher.try_consume_tokens(output[same:].tolist())
        state.taken = output[:num_taken].copy()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32) if num_taken == len(output) else None
        if matcher.is_error() or num_taken < len(output) - row.num_drafts:
            if state.failed_at is None:
                state.failed_at = row.position
            return None
        state.is_first = False
        return mask

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        self._rows = rows

    def apply(self, logits: Tensor) -> None:
        for row in self._rows:
            mask = self.mask(row.sampling)
            if mask is not None:
                allowed = np.unpackbits(mask.view(np.uint8), count=logits.shape[1], bitorder="little").astype(bool)
                logits[row.row, torch.from_numpy(~allowed).to(logits.device)] = -math.inf

    def _state(self, sequence: SampledSequence) -> _State:
        state = self._states.get(sequence)
        if state is None:
            wanted = sequence.params.structured_outputs
            assert wanted is not None, "the processor needs the parameters"
            state = self._states[sequence] = _State(self._matchers.compile(wanted))
        return state


def _num_alike(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many leading entries are the same."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(different[0]) if len(different) else shorter
