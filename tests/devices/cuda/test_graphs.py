"""Decode steps that are captured and repeated: on tensors of their own, with nothing of the step before them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, LoRARequest, SamplingParams
from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata, IntermediateTensors, ModelInput, NotedStates
from octavo.devices import DEVICES
from octavo.devices.cuda.attention import CHUNK, LONGEST, CudaBackend
from octavo.devices.cuda.graphs import MAX_GRAPHS, MAX_ROWS, GraphedModel
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.worker.batch.packed_arrays import copy_to_device
from tests.devices.cuda.interpreted import NAME, RepeatedCalls
from tests.devices.cuda.test_engine import generate
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.lora.adapter_folders import LINEAR, make_adapter


class Model:
    """Computes with everything that a step has on the device, and counts its calls."""

    def __init__(self, also: Callable[[ModelInput], object] = lambda _: None) -> None:
        self.num_calls = 0
        self._also = also

    def __call__(self, batch: ModelInput) -> Tensor:
        self.num_calls += 1
        self._also(batch)
        sums = batch.token_ids + 2 * batch.positions
        for each in batch.attention:
            sums = sums + (each.sequence_lengths * each.block_tables.sum(dim=1)).sum() + each.slot_mapping
        return torch.stack((sums, -sums), dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


def batch(*lengths: int, first_token: int = 3, num_groups: int = 1, queries: int = 1, width: int = 40) -> ModelInput:
    tables = [[row + 1 + block for block in range(width)] for row in range(len(lengths))]
    made = AttentionMetadata.build([queries] * len(lengths), lengths, tables, 16)
    others = [replace(made, slot_mapping=made.slot_mapping + group) for group in range(1, num_groups)]
    positions = torch.tensor([length - queries + i for length in lengths for i in range(queries)])
    return ModelInput(torch.arange(len(positions)) + first_token, positions, [made, *others], [])


def packed(step: ModelInput) -> ModelInput:
    """Return the step as a device apart from the host has it: what is not gathered there lies in one memory."""
    (group,) = step.attention
    names = ("query_starts", "sequence_lengths", "slot_mapping", "block_tables")
    arrays = [step.positions.numpy(), *(getattr(group, name).numpy() for name in names)]
    memory, (positions, *others) = copy_to_device(arrays, torch.device("cpu"))
    group = replace(group, **dict(zip(names, others, strict=True)))
    return replace(step, positions=positions, attention=[group], packed=memory)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_each_step_is_computed_from_its_own_tensors(num_groups: int) -> None:
    model, before = Model(), RepeatedCalls.num_replays
    graphed = GraphedModel(model, RepeatedCalls)
    for number in range(6):
        lengths = (30 + number, 7, 100 + 3 * number)
        step = batch(*lengths, first_token=number, num_groups=num_groups)
        assert torch.equal(graphed(step), Model()(step))
    assert RepeatedCalls.num_replays - before == 5


@pytest.mark.parametrize("change", [packed, lambda step: step], ids=["one memory", "apart"])
def test_all_steps_read_the_same_memory_until_one_is_larger(change: Callable[[ModelInput], ModelInput]) -> None:
    graphed = GraphedModel(Model(), RepeatedCalls)

    def run(*lengths: int, width: int) -> int:
        for first_token in (3, 9):  # captured, and repeated among the others
            step = change(batch(*lengths, first_token=first_token, width=width))
            assert torch.equal(graphed(step), Model()(step))
        *_, last = graphed._steps.values()
        return last.batch.attention[0].block_tables.untyped_storage().data_ptr()

    shapes: Any = [((30, 7, 100, 9), 40), ((30, 7), 40), ((500,), 40), ((30, 7, 100, 9), 20)]
    (before,) = {run(*lengths, width=width) for _ in range(3) for lengths, width in shapes}
    after = run(*[30] * 9, width=80)
    assert after != before
    assert [run(*lengths, width=width) for lengths, width in shapes] == [before] * 4, "graphs read where they did"
    assert run(40, 41, 42, width=40) == after


def test_steps_whose_tensors_lie_in_one_memory_and_others_of_the_same_size_are_each_their_own() -> None:
    graphed, before = GraphedModel(Model(), RepeatedCalls), RepeatedCalls.num_replays
    for number in range(6):
        step = batch(30 + number, 7, first_token=number)
        step = packed(step) if number % 2 else step
        assert torch.equal(graphed(step), Model()(step))
    assert RepeatedCalls.num_replays - before == 4


def test_states_that_are_noted_are_kept_too() -> None:
    class Noting(Model):
        def __call__(self, batch: ModelInput) -> Any:
            hidden = super().__call__(batch)
            return NotedStates(hidden, (hidden + 1, hidden + 2))

    graphed, before = GraphedModel(Noting(), RepeatedCalls), RepeatedCalls.num_replays
    for number in range(4):
        found, expected = graphed(batch(20 + number, 4)), Noting()(batch(20 + number, 4))
        for one, other in zip((found.hidden, *found.streams), (expected.hidden, *expected.streams), strict=True):
            assert torch.equal(one, other)
    assert RepeatedCalls.num_replays - before == 3


def test_a_stage_keeps_what_it_receives_beside_numbers_that_came_in_one_copy() -> None:
    class Receiving(Model):
        def __call__(self, batch: ModelInput) -> Tensor:
            assert batch.received is not None
            return super().__call__(batch) + batch.received.hidden[:, :2]

    model, before = Receiving(), RepeatedCalls.num_replays
    graphed = GraphedModel(model, RepeatedCalls)
    for number in range(4):
        step = packed(batch(30 + number, 7, first_token=number))
        step = replace(step, received=IntermediateTensors(torch.full((2, 500), float(number)), None))
        assert torch.equal(graphed(step), Receiving()(step))
    assert RepeatedCalls.num_replays - before == 3


def test_steps_of_other_rows_and_bounds_have_graphs_of_their_own() -> None:
    before = RepeatedCalls.num_replays
    graphed = GraphedModel(Model(), RepeatedCalls)
    for lengths in ((30,), (30, 31), (CHUNK, 9), (CHUNK + 1, 9), (5 * CHUNK, 9), (7 * CHUNK, 8)) * 2:
        step = batch(*lengths, width=8 * CHUNK // 16)
        assert torch.equal(graphed(step), Model()(step))
    assert RepeatedCalls.num_replays - before == 1 + 6 + 1  # (512, 9) is like (30, 31), and 7 · 512 like 5 · 512


def test_prompts_and_large_steps_and_steps_with_images_are_launched_by_the_host() -> None:
    model, before = Model(), RepeatedCalls.num_replays
    graphed = GraphedModel(model, RepeatedCalls)
    special = replace(batch(9, 9), rope_positions=torch.zeros(3, 2, dtype=torch.int64))
    for step in (batch(20, 30, queries=4), batch(*[5] * (MAX_ROWS + 1)), special):
        for _ in range(3):
            assert torch.equal(graphed(step), Model()(step))
    assert RepeatedCalls.num_replays == before
    assert model.num_calls == 9


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda each: max(each.attention[0].lengths), "what reads the lengths of sequences on the host"),
        (lambda each: each.token_ids.max().item(), "torch's item reads values on the host"),
        (lambda each: bool(each.positions[0] > 3), "torch's __bool__ reads values on the host"),
        (lambda each: each.positions[each.positions > 3], "how many values a mask selects is read on the host"),
        (lambda each: torch.tensor([len(each.positions)]), "torch's tensor reads values on the host"),
    ],
)
def test_a_model_that_reads_values_is_not_captured(
    reads: Callable[[ModelInput], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = Model(reads), RepeatedCalls.num_replays
    graphed = GraphedModel(model, RepeatedCalls)
    with caplog.at_level(logging.INFO):
        for number in range(4):
            step = batch(9 + number, 5)
            assert torch.equal(graphed(step), Model()(step))
    assert RepeatedCalls.num_replays == before
    assert [each.message for each in caplog.records] == [f"decode steps are not captured as CUDA graphs: {reason}"]


@pytest.mark.parametrize("is_shared", [False, True])
def test_each_rank_pads_steps_even_if_one_of_them_captures_none(is_shared: bool) -> None:
    graphed = GraphedModel(Model(lambda each: each.positions.tolist()), RepeatedCalls, is_shared=is_shared)
    sizes = (1, 2, 3, 9, 63, 65, MAX_ROWS, MAX_ROWS + 1)
    filled = [1, 2, 4, 16, 64, 80, MAX_ROWS, MAX_ROWS + 1]
    assert [*map(graphed.padded, sizes)] == filled
    graphed(batch(9, 5))
    assert [*map(graphed.padded, sizes)] == (filled if is_shared else [*sizes])


def test_what_cannot_be_captured_is_launched_by_the_host(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(RepeatedCalls):
        def capture(self, run: Callable[[], object]) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = Model()
    graphed = GraphedModel(model, Refusing)
    with caplog.at_level(logging.INFO):
        for number in range(4):
            step = batch(9 + number, 5)
            assert torch.equal(graphed(step), Model()(step))
    assert len(caplog.records) == 1
    assert "operation not permitted when stream is capturing" in caplog.text
    assert "and more" not in caplog.text


def test_the_number_of_graphs_is_bounded() -> None:
    graphed = GraphedModel(Model(), RepeatedCalls)
    for width in range(1, MAX_GRAPHS + 20):
        graphed(batch(9, width=width))
    assert len(graphed._steps) == MAX_GRAPHS


def test_a_bound_of_lengths_changes_no_bit() -> None:
    torch.manual_seed(0)
    backend, lengths = CudaBackend(CudaRuntime(), torch.float32), (600, 70)
    metadata = batch(*lengths, width=64).attention[0]
    cache = torch.randn(2, 70, 2, 16, 16)
    q, k, v = (torch.randn(2, heads, 16) for heads in (4, 2, 2))
    expected = backend.run(q, k, v, cache.clone(), replace(metadata, derived={}), Scores(0.25))
    bounded = replace(metadata, lengths=[0, 0], derived={LONGEST: 4 * CHUNK})
    assert torch.equal(backend.run(q, k, v, cache.clone(), bounded, Scores(0.25)), expected)


@pytest.mark.parametrize("cache", ["auto", pytest.param("fp8", marks=pytest.mark.long)])
def test_the_engine_repeats_its_decode_steps(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_byte_tokenizer(make_checkpoint("qwen3", tmp_path / "model", vocab_size=300, num_hidden_layers=1))
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    options = {"device": "cuda", "batch_invariant": True, "max_tokens": 6, "kv_cache_dtype": cache}
    before = RepeatedCalls.num_replays
    expected = generate(path, **options, enforce_eager=True)
    assert RepeatedCalls.num_replays == before
    assert generate(path, **options) == expected
    assert RepeatedCalls.num_replays > before
    drawn = generate(path, device="reference", max_tokens=6, kv_cache_dtype=cache)
    assert [tokens for tokens, _ in drawn] == [tokens for tokens, _ in expected]


def test_steps_with_adapters_are_repeated_until_slots_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_byte_tokenizer(make_checkpoint("llama", tmp_path / "model", vocab_size=300))
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    folders = [make_adapter(path, tmp_path / name, LINEAR[:1], rank=4, seed=seed) for seed, name in enumerate("ab", 1)]
    first, second = (LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, 1))
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    found, num_captures = [], []
    for enforce_eager in (True, False):
        sizes: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 4}
        lora: Any = {"enable_lora": True, "max_loras": 1, "enforce_eager": enforce_eager}
        with LLM(str(path), device="cuda", enable_prefix_caching=False, **sizes, **lora) as llm:
            for adapter in (first, second):
                before = RepeatedCalls.num_captures
                outputs = llm.generate(["ab"], params, use_tqdm=False, lora_request=adapter)
                found.append(outputs[0].outputs[0].token_ids)
                num_captures.append(RepeatedCalls.num_captures - before)
    assert found[2:] == found[:2]
    assert found[0] != found[1]
    assert num_captures[:2] == [0, 0]
    assert min(num_captures[2:]) > 0  # a graph would go on with the factors that it was captured with
