"""Launches steps on a device beside the host, and reads their results later, when the next step is launched."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from octavo.core.pooling import PooledPrompt
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ModelRunnerOutput, RowOutput, SchedulerOutput
from octavo.devices.device import DrawingModel
from octavo.devices.token_store import DeviceTokenStore
from octavo.distributed.mesh import Mesh
from octavo.sampling.chunks import chunks, rows_per_chunk
from octavo.sampling.metadata import RowSamples
from octavo.sampling.sampler import RepeatableSampler, Sampler
from octavo.worker.batch.input_batch import BatchRow
from octavo.worker.batch.sequence_state import SequenceState
from octavo.worker.drawing import LOGITS_BYTES, Position, output_of, positions_of
from octavo.worker.model_runner import ModelRunner, RunnerParts
from octavo.worker.shared_sampler import logits_of_all
from octavo.worker.whole_steps import WholeSteps, is_decode


class LaunchingRunner(ModelRunner):
    """A runner that does not wait for steps whose draws need only data on the device.

    Their tokens are stored there, where the next step reads them; the host gets them when the step is collected, in the
    order of the steps. Any other step begins when all earlier ones are collected, because the host needs their tokens
    for it. Every tensor rank draws the same tokens, from the logits of all ranks, so none waits for another host.
    """

    def __init__(self, parts: RunnerParts, launches: RepeatableSampler, mesh: Mesh, store: DeviceTokenStore) -> None:
        """launches: the sampler of the device."""
        super().__init__(parts)
        self._launches, self._mesh, self._store, self._vocab_size = launches, mesh, store, parts.vocab_size
        self._whole_steps = WholeSteps(launches, mesh, store, self.sequences, parts.vocab_size)
        # the model may be replaced by one that measures its calls, which does not draw
        self._drawing_model = self.model if isinstance(self.model, DrawingModel) else None
        self._launched: deque[tuple[Future[ModelRunnerOutput], Callable[[], ModelRunnerOutput]]] = deque()
        """For each step that is not collected yet, a function that waits for its results."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(step)()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Launch a step in the order of steps, and return a function that waits for its results."""
        if not self._may_launch(step):
            self._collect_all()
            output = super().execute(step)
            return lambda: output
        self._update_sequences(step)
        swap_s = self.cache.apply(step.block_ops)
        rows = self._rows(step)
        num_padding_rows = self._num_padding_rows(rows)
        batch = self.parts.builder.build(rows, num_padding_rows=num_padding_rows)
        wait = None
        if self._drawing_model is not None and self.model is self._drawing_model and is_decode(rows):
            wait = self._whole_steps.launch(self._drawing_model, batch, rows, num_padding_rows)
        if wait is None:
            hidden = self.model(batch)
            assert isinstance(hidden, Tensor), "no layers are noted where nothing reads them"
            wait = self._draw(hidden, rows)
        future: Future[ModelRunnerOutput] = Future()
        step_id, outputs = step.step_id, wait
        self._launched.append((future, lambda: ModelRunnerOutput(step_id=step_id, rows=outputs(), swap_s=swap_s)))
        return lambda: self._result(future)

    def finish(self, timeout_s: float) -> None:
        """Wait for launched steps, at most `timeout_s`. The reader of a step's results gets its error."""

        def collect() -> None:
            while self._launched:
                with suppress(IndexError):  # a reader has collected the last one
                    self._collect_next()

        thread = threading.Thread(target=collect, name="octavo-finishing", daemon=True)
        thread.start()
        thread.join(timeout_s)

    def _may_launch(self, step: SchedulerOutput) -> bool:
        if not step.rows or self.drawing is None or self.parts.drafter is not None:
            return False
        if self._encodes(step):
            return False
        params = {new.seq_id: (new.params, new.pooled) for new in step.new_sequences}
        for row in step.rows:
            if row.num_samples > 1 or row.num_candidates or row.num_prompt_logprobs or row.drafts:
                return False
            if row.seq_id in params:
                may_launch = self._may_launch_for(*params[row.seq_id])
            else:
                may_launch = self._may_launch_next(self.sequences[row.seq_id])
            if not may_launch:
                return False
        # a fork copies tokens that may be known to the device alone
        return all(new.parent_id is None for new in step.new_sequences)

    def _encodes(self, step: SchedulerOutput) -> bool:
        """Return whether rows of a step may read what is encoded, or given, in place of tokens."""
        encodings = self.parts.encodings
        if encodings is None:
            return False
        if encodings.are_cached or any(new.media for new in step.new_sequences):
            return True
        return any(row.seq_id in self.sequences and self.sequences[row.seq_id].media for row in step.rows)

    def _may_launch_next(self, state: SequenceState) -> bool:
        if state.may_launch is None:
            state.may_launch = self._may_launch_for(state.params, state.pooled)
        return state.may_launch

    def _may_launch_for(self, params: SamplingParams, pooled: PooledPrompt | None) -> bool:
        # only the first rank has grammars: the samplers of the others would launch
        is_plain = pooled is None and params.structured_outputs is None and params.logprob_token_ids is None
        if params.needs_logprobs and not self.parts.launches_logprobs:
            return False
        return is_plain and self._launches.may_launch(params)

    def _draw(self, hidden: Tensor, rows: Sequence[BatchRow]) -> Callable[[], list[RowOutput]]:
        """Draw for the rows that need it, store tokens on the device, and return a function that waits for results."""
        wanted = list(positions_of(rows))
        if not wanted:
            return partial(self._results, rows, wanted, [])
        if len(wanted) < len(hidden):
            indices = torch.from_numpy(np.array([each.token for each in wanted]))
            hidden = hidden[indices.to(hidden.device, non_blocking=True)]
        draws = []
        for start, stop in chunks(len(wanted), rows_per_chunk(self._vocab_size, LOGITS_BYTES)):
            logits = logits_of_all(self.model.compute_logits(hidden[start:stop]), self._mesh, self._vocab_size)
            draws.append(self._launches.launch(logits, [each.row for each in wanted[start:stop]]))
        states = [rows[each.place].state for each in wanted]
        lines, positions = [state.line for state in states], [each.row.position for each in wanted]
        self._store.append_drawn(lines, positions, torch.cat([each.token_ids for each in draws]))
        for state in states:
            state.num_tokens += 1
        return partial(self._results, rows, wanted, [each.wait for each in draws])

    def _results(
        self, rows: Sequence[BatchRow], wanted: Sequence[Position], waits: Sequence[Callable[[], list[RowSamples]]]
    ) -> list[RowOutput]:
        """Return the results of rows. waits: each returns the results of some of the positions, in order."""
        results = [each for wait in waits for each in wait()]
        samples = {}
        for found, result in zip(wanted, results, strict=True):
            samples[found.place] = result
            state = rows[found.place].state
            if result.tokens and self.sequences.has(state):  # otherwise another sequence may have its line by now
                self._store.note([state.line], [found.row.position], [result.tokens[0].token_id])
        return [output_of(row, samples.get(place), None) for place, row in enumerate(rows)]

    def _collect_next(self) -> Future[ModelRunnerOutput]:
        """Wait for the oldest launched step. Its future gets the result, or the error for who waits for this step."""
        future, collect = self._launched.popleft()
        try:
            future.set_result(collect())
        except Exception as error:
            future.set_exception(error)
        return future

    def _collect_all(self) -> None:
        """Wait for all launched steps; raises the first error."""
        while self._launched:
            self._collect_next().result()

    def _result(self, future: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        """Return the result of a launched step, for which those before it are collected."""
        while self._launched and not future.done():
            self._collect_next()
        return future.result()


def make_runner(parts: RunnerParts, sampler: Sampler, mesh: Mesh) -> ModelRunner:
    """Return the runner for a device's sampler."""
    # the stages of a pipeline wait for each other
    if mesh.pipeline.size > 1 or not isinstance(sampler, RepeatableSampler):
        return ModelRunner(parts)
    return LaunchingRunner(parts, sampler, mesh, cast(DeviceTokenStore, parts.sequences.tokens))
