"""Decode steps from recordings: the same bits as without, and only where a recording is the whole of the step."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import EmbeddingOverride, ModelInput
from octavo.devices.cpu import recorded_model
from octavo.devices.cpu.recorded_model import RecordedModel
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.token_store import HostTokenStore
from octavo.ops.registry import Ops
from octavo.worker.batch.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from tests.conformance.runtimes import LEVELS
from tests.worker.prefix_model import KEYS_AND_VALUES, new_sequence, row

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

NUM_SEQS = 6


class NormModel:
    """Norms of norms of what lies in the batch: token ids and positions, seen as numbers."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.weight = torch.rand(4).bfloat16()
        self.num_runs = 0

    def __call__(self, batch: ModelInput) -> Tensor:
        self.num_runs += 1
        tokens, positions = (each.view(torch.bfloat16).view(-1, 4) for each in (batch.token_ids, batch.positions))
        normed, total = self.ops.add_rms_norm(tokens, positions, self.weight, 1e-6)
        for _ in range(5):
            normed, total = self.ops.add_rms_norm(normed, total, self.weight, 1e-6)
        return self.ops.rms_norm(normed, self.weight, 1e-6)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class Steps:
    """Batches of some rows over the same sequences, as the runner builds them."""

    def __init__(self) -> None:
        self.sequences = Sequences(HostTokenStore())
        for seq_id in range(NUM_SEQS):
            # token ids are int32; the upper half of each word in the batch is 0
            numbers = torch.rand(40, 2, generator=torch.Generator().manual_seed(seq_id)).bfloat16()
            self.sequences.add(new_sequence(seq_id, numbers.view(torch.int32).view(-1).tolist(), list(range(10))))
        self.builder = InputBatchBuilder(
            [],
            self.sequences,
            KEYS_AND_VALUES,
            block_size=4,
            max_num_tokens=64,
            device=torch.device("cpu"),
        )

    def batch(self, *rows: tuple[int, int, int]) -> ModelInput:
        return self.builder.build([BatchRow(row(*each), self.sequences[each[0]]) for each in rows])


def make_model() -> tuple[RecordedModel, NormModel, Steps]:
    runtime = CpuRuntime.open()
    model = NormModel(runtime.bind())
    return RecordedModel(model, runtime), model, Steps()


def test_steps_from_a_recording_have_the_bits_of_steps_that_python_runs() -> None:
    recorded, model, steps = make_model()
    eager = NormModel(CpuRuntime.open().bind())
    eager.weight = model.weight
    source = torch.Generator().manual_seed(1)
    for number in range(60):
        count = int(torch.randint(1, NUM_SEQS + 1, (), generator=source))
        # in between a step that computes pieces of prompts uses the same scratch memory and the same buffers
        num_tokens = 3 if number % 7 == 3 else 1
        rows = [(seq_id, (number + 3 * seq_id) % 37, num_tokens) for seq_id in range(count)]
        batch = steps.batch(*rows)
        assert torch.equal(recorded(batch), eager(batch)), rows
    assert model.num_runs < 60 - 25


def test_a_size_is_recorded_when_it_comes_for_the_second_time() -> None:
    recorded, model, steps = make_model()
    runs = []
    for count in (2, 3, 2, 2, 3, 3, 2, 3):
        recorded(steps.batch(*((seq_id, 5, 1) for seq_id in range(count))))
        runs.append(model.num_runs)
    assert runs == [1, 2, 3, 3, 4, 4, 4, 4]


def test_a_step_with_pieces_of_prompts_is_recorded_whichever_rows_they_are_in() -> None:
    recorded, model, steps = make_model()
    eager = NormModel(CpuRuntime.open().bind())
    eager.weight = model.weight
    for number, sizes in enumerate([(1, 1, 6), (1, 1, 6), (6, 1, 1), (2, 3, 3), (1, 1, 6)]):
        batch = steps.batch(*((seq_id, 4 + number, size) for seq_id, size in enumerate(sizes)))
        assert torch.equal(recorded(batch), eager(batch))
    assert model.num_runs == 2
    recorded(steps.batch((0, 5, 1), (1, 5, 7)))
    assert model.num_runs == 3, "as many tokens in fewer rows"


def test_recordings_are_limited_and_the_least_recently_used_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_model, "MAX_RECORDINGS", 2)
    recorded, model, steps = make_model()

    def runs(count: int) -> int:
        before = model.num_runs
        recorded(steps.batch(*((seq_id, 5, 1) for seq_id in range(count))))
        return model.num_runs - before

    assert [runs(count) for count in (1, 1, 2, 2, 1, 2, 1)] == [1, 1, 1, 1, 0, 0, 0]
    assert runs(3) == 1  # takes the place of 2
    assert [runs(count) for count in (1, 2)] == [0, 1]


@pytest.mark.parametrize(
    "more",
    [
        {"embeddings": EmbeddingOverride(torch.tensor([1]), torch.zeros(1, 4))},
        {"rope_positions": torch.zeros(3, 2, dtype=torch.int64)},  # alone: on a stage that embeds nothing
    ],
)
def test_a_step_with_what_few_steps_have_is_run_by_python_and_recordings_stay(more: dict[str, Any]) -> None:
    recorded, model, steps = make_model()
    plain = steps.batch((0, 5, 1), (1, 5, 1))
    for _ in range(2):
        recorded(plain)
    recorded(replace(plain, **more))
    assert model.num_runs == 3
    recorded(plain)
    assert model.num_runs == 3


def test_larger_steps_are_run_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_model, "MAX_TOKENS", 2)
    recorded, model, steps = make_model()
    for _ in range(4):
        recorded(steps.batch((0, 5, 1), (1, 5, 1), (2, 5, 1)))
    assert model.num_runs == 4


class TorchModel(NormModel):
    def __call__(self, batch: ModelInput) -> Tensor:
        return super().__call__(batch).neg()


class HostModel(NormModel):
    def __call__(self, batch: ModelInput) -> Tensor:
        assert max(batch.attention[0].lengths) > 0
        return super().__call__(batch)


class ReadingModel(NormModel):
    def __call__(self, batch: ModelInput) -> Tensor:
        assert batch.positions[0].item() >= 0
        return super().__call__(batch)


class WritingModel(NormModel):
    def __call__(self, batch: ModelInput) -> Tensor:
        hidden = super().__call__(batch)
        hidden[0] = 0
        return hidden


@pytest.mark.parametrize(
    ("kind", "obstacle"),
    [
        (TorchModel, "torch's neg"),
        (HostModel, "lengths of sequences on the host"),
        (ReadingModel, "torch's item"),
        (WritingModel, "torch's __setitem__"),
    ],
)
def test_a_model_that_does_more_than_call_kernels_is_not_recorded_and_the_log_says_why(
    kind: type[NormModel], obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = CpuRuntime.open()
    model = kind(runtime.bind())
    recorded, steps = RecordedModel(model, runtime), Steps()
    with caplog.at_level(logging.INFO), torch.inference_mode():
        for number in range(5):
            batch = steps.batch((0, 5 + number, 1), (1, 6 + number, 1))
            assert torch.equal(recorded(batch), model(batch))
    assert model.num_runs == 10
    (line,) = caplog.messages
    assert obstacle in line


class LengthsModel(NormModel):
    """Reads lengths of its second cache group on the host."""

    def __call__(self, batch: ModelInput) -> Tensor:
        return torch.tensor(batch.attention[1].lengths)


def test_a_step_in_which_recording_is_given_up_has_the_lengths_of_each_cache_group() -> None:
    runtime = CpuRuntime.open()
    recorded = RecordedModel(LengthsModel(runtime.bind()), runtime)
    plain = Steps().batch((0, 5, 1))
    batch = replace(plain, attention=[*plain.attention, replace(plain.attention[0], lengths=(33,))])
    assert [recorded(batch).tolist() for _ in range(3)] == [[33]] * 3


def test_a_model_that_fails_while_it_is_recorded_leaves_the_runtime_usable() -> None:
    recorded, model, steps = make_model()
    recorded(steps.batch((0, 5, 1)))
    norm, model.ops = model.ops, Ops({}, ())
    with pytest.raises(AttributeError, match="no operator is called add_rms_norm"):
        recorded(steps.batch((0, 6, 1)))
    model.ops = norm
    expected = model(steps.batch((0, 7, 1)))
    for _ in range(3):
        assert torch.equal(recorded(steps.batch((0, 7, 1))), expected)
