"""Decode steps in one launch: the model, the draws, and the write of the drawn tokens to the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.core.step import RowOutput, TokenLogprobs
from octavo.devices.device import DrawingModel
from octavo.devices.token_store import DeviceTokenStore
from octavo.distributed.mesh import Mesh
from octavo.sampling.chunks import rows_per_chunk
from octavo.sampling.metadata import RowSamples
from octavo.sampling.sampler import DrawnTokens, RepeatableSampler
from octavo.worker.batch.input_batch import BatchRow
from octavo.worker.batch.sequence_state import Sequences, SequenceState
from octavo.worker.drawing import LOGITS_BYTES, output_of
from octavo.worker.shared_sampler import logits_of_all


class WholeSteps:
    """Launches whole decode steps. Only a few numbers of a row change from one of these steps to the next."""

    def __init__(
        self,
        sampler: RepeatableSampler,
        mesh: Mesh,
        store: DeviceTokenStore,
        sequences: Sequences,
        vocab_size: int,
    ) -> None:
        self._sampler, self._mesh, self._store, self._sequences = sampler, mesh, store, sequences
        self._vocab_size, self._max_rows = vocab_size, rows_per_chunk(vocab_size, LOGITS_BYTES)

    def launch(
        self, model: DrawingModel, batch: ModelInput, rows: Sequence[BatchRow], num_padding_rows: int
    ) -> Callable[[], list[RowOutput]] | None:
        """Run the model on rows of one token each, draw the next tokens, and return a function that waits for results.

        num_padding_rows: copies of the first row after the others in the batch. Returns None, with nothing computed, if
        there are too many rows or a draw needs more than logits; this is the same on all ranks.
        """
        if len(rows) + num_padding_rows > self._max_rows:
            return None
        states = [state for _, state in rows]
        drawing = states + states[:1] * num_padding_rows
        positions = [state.num_tokens for state in drawing]
        assert positions == list(batch.attention[0].lengths), "a row samples before all known tokens are computed"
        plan = self._sampler.plan(drawing, positions)
        if plan is None:
            return None
        lines = [state.line for state in drawing]
        places = np.array(positions)
        # a copy's token goes where the next step stores one: at another place in a batch bits may differ
        places[len(rows) :] += 1
        plan.asked[:, -1] = self._store.places(np.array(lines, dtype=np.int64), places)
        tokens = self._store.on_device()

        def draw(logits: Tensor, asked: Tensor) -> Tensor:
            whole = logits_of_all(logits, self._mesh, self._vocab_size)
            token_ids, told = self._sampler.draw(whole, plan.kind, asked)
            tokens.view(-1).index_copy_(0, asked[:, -1].long(), token_ids.int())
            return told

        # a grown store is a new tensor, even if it begins at the same address
        told = model.draw(batch, plan.asked, (plan.kind, tokens.shape), draw)
        if told is None:  # other ranks may have a graph for this step, and exchange as many logits in it
            told = draw(model.compute_logits(model(batch)), torch.from_numpy(plan.asked).to(tokens.device))
        for state in states:
            state.num_tokens += 1
        del lines[len(rows) :], positions[len(rows) :]
        read = self._sampler.read(told[: len(rows)], states, positions)
        self._mesh.watch()  # the graph has launched the gather without a call of the group
        return lambda: self._results(rows, states, lines, positions, read())

    def _results(
        self,
        rows: Sequence[BatchRow],
        states: Sequence[SequenceState],
        lines: Sequence[int],
        positions: Sequence[int],
        drawn: DrawnTokens,
    ) -> list[RowOutput]:
        token_ids, errors, has = drawn.token_ids, drawn.errors, self._sequences.has
        is_sound = not errors and not any(state.error for state in states)
        if is_sound and all(map(has, states)):
            self._store.note(lines, positions, token_ids)
        else:  # another sequence may have the line of one that has ended
            noted = [place for place, state in enumerate(states) if has(state) and place not in errors]
            if noted:
                self._store.note(*([each[place] for place in noted] for each in (lines, positions, token_ids)))
        found = [[TokenLogprobs(token_id=token_id)] for token_id in token_ids]
        if is_sound:
            return [RowOutput(state.seq_id, state.epoch, each) for state, each in zip(states, found, strict=True)]
        return [
            output_of(row, RowSamples([] if place in errors else each, errors.get(place)), None)
            for place, (row, each) in enumerate(zip(rows, found, strict=True))
        ]


def is_decode(rows: Sequence[BatchRow]) -> bool:
    """Return whether each row computes one token, and draws the next one."""
    return all(scheduled.num_tokens == 1 and scheduled.num_samples == 1 for scheduled, _ in rows)
