"""Bars the tokens that the grammar of a request does not admit."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Final
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
from octavo.structured_output.marks import Mask
from octavo.structured_output.matchers import Matchers
from octavo.structured_output.progress import CompiledForm, Progress

_PATIENCE_S: Final = 0.005
_NUM_THREADS: Final = 4
"""A mask that takes long does not hold up the others."""

_MOST_RECOMPILED: Final = 16
"""How often a grammar is compiled for one sequence alone. Each time admits one token or more, mostly thousands."""


@dataclass(slots=True, eq=False)
class _Job:
    """The masks of the rows of a sequence in one step. `outputs` are the tokens before each row, which begin alike.

    is_late: a step has waited for it, and the next ones do not.
    """

    positions: list[int]
    outputs: list[NDArray[np.int32]]
    num_drafts: list[int]
    masks: Future[dict[int, Mask | None]] = field(default_factory=Future)
    is_late: bool = False

    def covers(self, row: SamplingRow) -> bool:
        """Return whether it has the mask of a row, computed from the same tokens."""
        if row.position not in self.positions:
            return False
        return np.array_equal(self.outputs[self.positions.index(row.position)], _output_of(row))


@dataclass(slots=True, eq=False)
class _State:
    """What is kept for a sequence.

    is_first: no mask was computed by the matcher yet, and no other sequence has it.
    failed_at: the position of the first row whose mask could not be computed.
    """

    compiled: Future[CompiledForm]
    num_recompiled: int = 0
    is_first: bool = False
    progress: Progress | None = None
    job: _Job | None = None
    failed_at: int | None = None


class GrammarProcessor:
    """A `MaskingProcessor` of the sequences that have a form.

    What it keeps follows from the tokens of a sequence: before a mask is computed, the matcher takes what is new and
    gives back what is not there any more. So no preemption, fork or draft can part the two.

    Masks are computed in threads, from `start` on, while the model computes the logits.
    """

    name = "structured_outputs"

    def __init__(self, matchers: Matchers, patience_s: float = _PATIENCE_S) -> None:
        """patience_s: how long the others wait for the mask of a row, beyond the time that the model takes."""
        self._matchers = matchers
        self._patience_s = patience_s
        self._states: WeakKeyDictionary[SampledSequence, _State] = WeakKeyDictionary()
        self._rows: Sequence[ProcessedRow] = ()
        self._queue: deque[tuple[_State, _Job]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._started_s = 0.0
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
            return RequestError.of(error)
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
        progress, wanted = state.progress, sequence.params.structured_outputs
        assert progress is not None
        assert wanted is not None
        if state.is_first or state.num_recompiled == _MOST_RECOMPILED:
            reason = progress.error or "its tokens are not of the form"
            said = f"takes too much work here: {reason:.200}; simplify it"
            if reason.startswith("NoExtension"):  # llguidance's word for no token that goes on
                said = "allows no text here: a rule that only refers to itself has no end; change it"
            return RequestError(
                f"the grammar {said}",
                field="structured_outputs",
                code="invalid_grammar",
                is_client_error=True,
            )
        anew = self._matchers.compile_anew(wanted, state.compiled)
        self._states[sequence] = _State(anew, state.num_recompiled + 1, is_first=True)
        return None

    def start(self, rows: Iterable[SamplingRow]) -> None:
        """Begin to compute the masks of rows. Of a sequence whose last ones are not there yet, none are begun."""
        num_new = 0
        for sequence, group in groupby(rows, key=attrgetter("sequence")):
            if not self.needs(sequence.params):
                continue
            state, wanted = self._state(sequence), list(group)
            is_ready = state.compiled.done() and state.compiled.exception() is None
            if not is_ready or not _is_settled(state) or (state.job and all(map(state.job.covers, wanted))):
                continue
            outputs = [_output_of(row).copy() for row in wanted]
            state.job = _Job([row.position for row in wanted], outputs, [row.num_drafts for row in wanted])
            self._queue.append((state, state.job))
            num_new += 1
        if num_new:
            self._started_s = time.monotonic()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, "octavo-masks")
            for _ in range(min(num_new, _NUM_THREADS)):
                self._pool.submit(self._work)

    def wait(self, rows: Sequence[SamplingRow]) -> None:
        """Wait for the masks of rows that were begun in this step, at most as long again as it takes since `start`, or
        the patience."""
        jobs = [self._states[row.sequence].job for row in rows if row.sequence in self._states]
        wanted = [job for job in jobs if job is not None and not job.is_late and not job.masks.done()]
        if wanted:
            wait([job.masks for job in wanted], timeout=max(self._patience_s, time.monotonic() - self._started_s))
            for job in wanted:
                job.is_late = True

    def is_ready(self, row: SamplingRow) -> bool:
        """Return whether the mask of a row is there."""
        job = self._state(row.sequence).job
        return job is not None and job.masks.done() and job.covers(row)

    def mask(self, row: SamplingRow) -> Mask | None:
        """Return the tokens that may be drawn, a bit for each; None for all, behind a draft that may not be there, and
        where the mask has failed."""
        job = self._state(row.sequence).job
        if job is None or not job.covers(row):
            self.start([row])
            job = self._state(row.sequence).job
        assert job is not None
        return job.masks.result()[row.position]

    def forced(self, sequence: SampledSequence, num_tokens: int) -> tuple[int, ...]:
        """Return tokens that have to follow the first `num_tokens` of a sequence; none where masks of it are being
        computed."""
        state = self._states.get(sequence)
        if state is None or state.progress is None or not _is_settled(state):
            return ()
        output = sequence.first_tokens(num_tokens)[sequence.num_prompt_tokens :]
        is_taken = state.progress.move_to(output) == len(output)
        return tuple(state.progress.forced()) if is_taken else ()

    def _work(self) -> None:
        while self._queue:
            try:
                state, job = self._queue.popleft()
            except IndexError:
                return  # another thread has taken the last one
            try:
                rows = zip(job.positions, job.outputs, job.num_drafts, strict=True)
                job.masks.set_result({row[0]: self._compute(state, *row) for row in rows})
            except Exception as error:
                job.masks.set_exception(error)

    def _compute(self, state: _State, position: int, output: NDArray[np.int32], num_drafts: int) -> Mask | None:
        if state.progress is None:
            state.progress = Progress(state.compiled.result())
        progress = state.progress
        num_taken = progress.move_to(output)
        mask = progress.mask() if num_taken == len(output) else None
        if progress.error is not None or num_taken < len(output) - num_drafts:
            if state.failed_at is None:
                state.failed_at = position
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


def _is_settled(state: _State) -> bool:
    return state.job is None or state.job.masks.done()


def _output_of(row: SamplingRow) -> NDArray[np.int32]:
    """Return the output tokens before a row, a view that is valid during the step."""
    return row.tokens[row.sequence.num_prompt_tokens :]
