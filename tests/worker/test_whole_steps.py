"""Decode steps that are one launch: what comes back of them to rows, and to lines that may be others' by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import ScheduledSequence
from octavo.devices.token_store import DeviceTokenStore
from octavo.distributed.collectives import Collectives
from octavo.distributed.mesh import Mesh
from octavo.sampling.sampler import DrawnTokens, DrawPlan
from octavo.worker.batch.input_batch import BatchRow
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.whole_steps import WholeSteps, is_decode
from tests.worker.prefix_model import new_sequence

DRAWN = [7, 8, 9]
PARAMS = SamplingParams(seed=0)


class FakeSampler:
    """Draws `DRAWN`, and finds errors."""

    def __init__(self, errors: dict[int, RequestError]) -> None:
        self.errors = errors
        self.plans: list[list[int]] = []

    def plan(self, sequences: Sequence[Any], positions: Sequence[int]) -> DrawPlan:
        self.plans.append(list(positions))
        return DrawPlan(0, np.zeros((len(positions), 8)))

    def draw(self, logits: torch.Tensor, kind: int, asked: Any) -> Any:
        assert logits.shape == (len(asked), 32), "the shares of both ranks"
        tokens = torch.tensor(DRAWN + DRAWN)[: len(asked)]
        return tokens, tokens

    def read(self, told: Any, sequences: Sequence[Any], positions: Sequence[int]) -> Callable[[], DrawnTokens]:
        return lambda: DrawnTokens(told.tolist(), self.errors)


class FakeModel:
    def draw(self, batch: Any, asked: Any, key: Any, draw: Any) -> Any:
        return draw(torch.zeros(len(asked), 16), torch.from_numpy(asked))


class OfTwo(Collectives):
    """A group with another rank that has the same logits. Counts how often it is told to watch."""

    num_watches = 0

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        return torch.cat((share, share), dim=1)

    def watch(self) -> None:
        self.num_watches += 1


class UncapturedModel:
    """Has no launch of the step, and notes of how many tokens it computes logits."""

    def __init__(self) -> None:
        self.computed: list[int] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        return torch.zeros(len(batch.lengths), 16)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.computed.append(len(hidden))
        return hidden

    def draw(self, batch: Any, asked: Any, key: Any, draw: Any) -> None:
        return None


class FakeBatch:
    def __init__(self, lengths: list[int]) -> None:
        self.attention = [self]
        self.lengths = lengths


def launched(
    errors: dict[int, RequestError], model: Any = None, num_padding_rows: int = 0, group: Collectives | None = None
) -> tuple[Sequences, list[BatchRow], Callable[[], list[Any]]]:
    sequences = Sequences(DeviceTokenStore(torch.device("cpu")))
    for seq_id in range(3):
        sequences.add(new_sequence(seq_id, [1, 2 + seq_id], [0], params=PARAMS))
    rows = [BatchRow(ScheduledSequence(seq_id, 0, 1, 1, 1), sequences[seq_id]) for seq_id in range(3)]
    mesh = Mesh(tensor_group=group or OfTwo())
    steps = WholeSteps(cast("Any", FakeSampler(errors)), mesh, cast("Any", sequences.tokens), sequences, 32)
    batch = cast("Any", FakeBatch([2] * (3 + num_padding_rows)))
    collect = steps.launch(model or cast("Any", FakeModel()), batch, rows, num_padding_rows)
    assert collect is not None
    return sequences, rows, collect


def test_what_is_drawn_is_stored_there_at_once_and_here_when_it_is_collected() -> None:
    sequences, rows, collect = launched({})
    assert [state.num_tokens for _, state in rows] == [3, 3, 3]
    there = sequences.tokens.on_device()
    assert [int(there[state.line, 2]) for _, state in rows] == DRAWN
    assert [int(state.first_tokens(3)[2]) for _, state in rows] == [0, 0, 0]
    assert [each.tokens[0].token_id for each in collect()] == DRAWN
    assert [int(state.first_tokens(3)[2]) for _, state in rows] == DRAWN


def test_a_gather_that_a_graph_has_launched_has_a_deadline_once_its_result_is_to_be_read() -> None:
    group = OfTwo()
    launched({}, group=group)
    assert group.num_watches == 1


def test_a_line_that_is_another_sequence_s_by_now_keeps_what_that_has() -> None:
    sequences, rows, collect = launched({})
    sequences.drop(1)
    sequences.add(new_sequence(4, [5, 6, 3], [0], params=PARAMS))
    assert sequences[4].line == rows[1].state.line
    assert [each.seq_id for each in collect()] == [0, 1, 2]
    assert sequences[4].first_tokens(3).tolist() == [5, 6, 3]
    assert int(sequences[2].first_tokens(3)[2]) == DRAWN[2]


def test_an_error_is_that_of_its_row_and_of_each_step_that_was_planned_already() -> None:
    error = RequestError("the logits are no numbers")
    _, rows, collect = launched({1: error})
    assert [each.error for each in collect()] == [None, error, None]
    assert rows[1].state.error == error
    assert int(rows[1].state.first_tokens(3)[2]) == 0


def test_all_states_may_have_ended_when_a_step_is_collected() -> None:
    sequences, _, collect = launched({})
    for seq_id in range(3):
        sequences.drop(seq_id)
    assert len(collect()) == 3


def test_a_step_that_this_rank_cannot_capture_has_the_logits_of_as_many_rows_as_on_other_ranks() -> None:
    model = UncapturedModel()
    sequences, rows, collect = launched({}, model, num_padding_rows=1)
    assert model.computed == [4], "ranks gather logits of rows and copies"
    assert [each.tokens[0].token_id for each in collect()] == DRAWN
    there = sequences.tokens.on_device()
    assert [int(there[state.line, 2]) for _, state in rows] == DRAWN


def test_rows_that_draw_nothing_or_compute_more_are_no_decode() -> None:
    state = cast("Any", None)
    plain = BatchRow(ScheduledSequence(0, 0, 1, 1, 1), state)
    assert is_decode([plain, plain])
    assert not is_decode([plain, BatchRow(ScheduledSequence(0, 0, 1, 1, 0), state)])
    assert not is_decode([plain, BatchRow(ScheduledSequence(0, 0, 1, 2, 1), state)])
