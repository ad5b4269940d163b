"""Steps that are launched before the tokens of the steps before them are known: the same tokens, whoever is beside."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, SamplingParams
from octavo.devices import DEVICES
from octavo.devices.cuda.sampler import CudaSampler
from octavo.devices.token_store import DeviceTokenStore
from octavo.distributed.mesh import Mesh
from octavo.engine.engine_core import EngineCore
from octavo.worker.launching import LaunchingRunner
from octavo.worker.model_runner import ModelRunner
from tests.devices.cuda.interpreted import NAME, RepeatedCalls
from tests.fakes.accounting import check_scheduler
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.vision import image, make_vision_checkpoint

PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "top_k": 5, "top_p": 0.8},
    {"seed": 2, "temperature": 0.7, "max_tokens": 3},
    {"seed": 7, "logprobs": 2},
]
PROCESSED: list[dict[str, Any]] = [
    {"seed": 8, "repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": -0.3, "logprobs": 1},
    {"temperature": 0.0, "bad_words": ["a", "ab"], "logit_bias": {97: 9.0, 98: 9.0, 99: 8.0}},
    {"seed": 9, "min_tokens": 5, "stop_token_ids": [*range(0, 300, 2)], "allowed_token_ids": [*range(0, 300, 3)]},
]
OTHERS: list[dict[str, Any]] = [
    {"seed": 3, "bad_words": ["a"]},
    {"seed": 4, "repetition_penalty": 1.3, "logprobs": 1},
    {"seed": 5, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"n": 2, "best_of": 2, "use_beam_search": True},
    {"seed": 6, "stop_token_ids": [*range(0, 300, 9)]},
]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    return write_byte_tokenizer(make_checkpoint("qwen3", tmp_path / "model", vocab_size=300, num_hidden_layers=1))


def generate(path: Path, kinds: list[dict[str, Any]], **args: Any) -> list[Any]:
    sizes = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 8}
    prompts: Any = [{"prompt_token_ids": [5 + i * (7 + row) % 90 for i in range(3 + row)]} for row in range(len(kinds))]
    params = [SamplingParams(**{"max_tokens": 8, "ignore_eos": True} | kind) for kind in kinds]
    with LLM(str(path), **{**sizes, **args}) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    return [[(each.token_ids, each.finish_reason) for each in output.outputs] for output in found]


@pytest.mark.parametrize(
    "kinds",
    [PLAIN, PROCESSED, pytest.param(PLAIN + PROCESSED + OTHERS, marks=pytest.mark.long)],
    ids=["plain", "processed", "mixed"],
)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_tokens_are_those_of_the_reference(path: Path, depth: int, kinds: list[dict[str, Any]]) -> None:
    expected = generate(path, kinds, device="reference")
    assert generate(path, kinds, device="cuda", max_steps_in_flight=depth) == expected
    tight = {
        "num_gpu_blocks_override": 5,
        "max_num_batched_tokens": 9,
        "preemption_mode": "swap",
        "swap_space": 1 << 20,
    }
    assert generate(path, kinds, device="cuda", max_steps_in_flight=depth, **tight) == expected


def test_steps_are_launched_before_the_last_one_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_waiting: list[int] = []
    launch = LaunchingRunner.launch
    monkeypatch.setattr(
        LaunchingRunner, "launch", lambda self, step: num_waiting.append(len(self._launched)) or launch(self, step)
    )
    generate(path, PLAIN[1:2] + PROCESSED, device="cuda", max_steps_in_flight=3)
    assert max(num_waiting) == 2


def launched_with(path: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch, **args: Any) -> None:
    """Assert that prompts have the tokens of the reference, and that of each one only the first step is waited for."""
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 64, **args}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    waited: list[int] = []
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, step: waited.append(len(step.rows)) or execute(self, step))

    def tokens(device: str) -> list[list[int]]:
        with LLM(str(path), device=device, **sizes) as llm:
            waited.clear()
            return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    expected = tokens("reference")
    assert tokens("cuda") == expected
    assert waited == [len(prompts)]


def test_steps_behind_vectors_are_launched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [{"prompt_embeds": torch.randn(7, 32)}, {"prompt_token_ids": [5, 6, 7]}]
    launched_with(path, prompts, monkeypatch, enable_prompt_embeds=True)


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_steps_behind_images_are_launched(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    prompts = [{"prompt": "w1 <image> w2", "multi_modal_data": {"image": image(0)}}, "w1 w2"]
    launched_with(make_vision_checkpoint(family, tmp_path), prompts, monkeypatch)


def test_requests_that_are_aborted_with_steps_in_flight_change_no_other_token_and_keep_no_block(path: Path) -> None:
    asked: list[tuple[int, dict[str, Any]]] = [
        (3, {"temperature": 0.0, "max_tokens": 8}),
        (14, {"seed": 1}),
        (5, {"seed": 2, "repetition_penalty": 1.3, "logprobs": 1, "max_tokens": 8}),
        (30, {"seed": 3}),
        (27, {"seed": 4, "max_tokens": 4}),
    ]
    requests: dict[str, tuple[Any, SamplingParams]] = {
        str(row): (
            {"prompt_token_ids": [7 + (5 + 2 * row) * i % 90 for i in range(length)]},
            SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | kind),
        )
        for row, (length, kind) in enumerate(asked)
    }
    # what an aborted request kept would leave no room for the next one
    sizes: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 5, "max_num_batched_tokens": 16}
    sizes |= {"max_num_seqs": 4, "max_steps_in_flight": 3, "enable_prefix_caching": False}
    with LLM(str(path), device="cuda", **sizes) as llm:
        alone = {name: llm.generate(*requests[name], use_tqdm=False)[0].outputs for name in "024"}
        engine, core = llm.engine, llm.engine.core
        assert isinstance(core, EngineCore)
        found: dict[str, Any] = {}

        def run(added: str, num_steps: int, aborted: str = "") -> None:
            for name in added:
                engine.add_request(name, *requests[name])
            for _ in range(num_steps):
                found.update({each.request_id: each.outputs for each in engine.step()})
                check_scheduler(core.scheduler)
            assert not aborted or len(core._in_flight) == 2
            engine.abort_request(aborted)

        run("012", 3, aborted="1")
        run("3", 1, aborted="3")
        run("4", 1)
        while engine.has_unfinished_requests():
            run("", 1)
        stats = core.stats()
    assert [found[name][0].finish_reason for name in "13"] == ["abort", "abort"]
    assert {name: found[name] for name in "024"} == alone
    assert (stats.num_used_blocks, stats.num_preemptions) == (0, 0)


def test_an_engine_that_ends_with_steps_in_flight_waits_for_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks have launched the same calls: their GPUs would wait for those that are ended here."""
    waiting: list[int] = []
    runners: list[LaunchingRunner] = []
    launch = LaunchingRunner.launch
    monkeypatch.setattr(LaunchingRunner, "launch", lambda self, step: runners.append(self) or launch(self, step))
    monkeypatch.setattr(Mesh, "close", lambda _: waiting.append(len(runners[0]._launched)))
    sizes: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8, "max_steps_in_flight": 3}
    with LLM(str(path), device="cuda", **sizes) as llm:
        prompt: Any = {"prompt_token_ids": [5, 6, 7]}
        llm.engine.add_request("0", prompt, SamplingParams(max_tokens=20, ignore_eos=True))
        llm.engine.step()
        assert len(runners[0]._launched) == 2
    assert waiting == [0]


def test_log_probabilities_are_the_same_bits_in_steps_that_wait(path: Path) -> None:
    def described(kinds: list[dict[str, Any]], depth: int) -> Any:
        args = {"device": "cuda", "max_steps_in_flight": depth, "batch_invariant": True}
        with LLM(str(path), dtype="float32", max_model_len=64, num_gpu_blocks_override=32, **args) as llm:
            params = [SamplingParams(max_tokens=5, ignore_eos=True, **kind) for kind in kinds]
            prompts: Any = [{"prompt_token_ids": [5, 6, 7]}] * len(kinds)
            return [each.outputs[0].logprobs for each in llm.generate(prompts, params, use_tqdm=False)]

    asked: list[dict[str, Any]] = [{"seed": 1, "logprobs": 3}, {"temperature": 0.0, "logprobs": 0}]
    alone = described(asked, 2)
    assert described([*asked, {"n": 2, "best_of": 2, "use_beam_search": True}], 2)[:2] == alone
    assert [len(each) for each in alone] == [5, 5]


def test_a_step_that_fails_while_another_is_begun_leaves_nobody_waiting() -> None:
    def fail() -> Any:
        raise RuntimeError("the GPU is lost")

    runner = object.__new__(LaunchingRunner)
    runner._launched = deque((Future(), fail) for _ in range(2))
    first, second = (future for future, _ in runner._launched)
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        runner._collect_all()
    for future in (first, second):
        with pytest.raises(RuntimeError, match="the GPU is lost"):
            runner._result(future)


@pytest.mark.parametrize(("enforce_eager", "method"), [(True, "launch"), (False, "read")])
def test_logits_that_are_no_numbers_end_one_request(
    enforce_eager: bool, method: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.devices.cuda.sampler import CudaSampler

    plain = getattr(CudaSampler, method)

    def spoil(self: Any, found: Any, rows: Any, *positions: Any) -> Any:
        sequences = rows if positions else [row.sequence for row in rows]
        drawn = positions[0] if positions else [row.position for row in rows]
        for place, (sequence, position) in enumerate(zip(sequences, drawn, strict=True)):
            if position == 8 and sequence.params.seed == 1:
                found[place, 0] = float("nan")  # a logit, or the largest one of those that were drawn from
        return plain(self, found, rows, *positions)

    monkeypatch.setattr(CudaSampler, method, spoil)
    sizes: Any = {"enforce_eager": enforce_eager}
    sizes |= {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_steps_in_flight": 3}
    prompts: Any = [{"prompt_token_ids": [5, 6, 7 + row]} for row in range(3)]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed) for seed in range(3)]
    with LLM(str(path), device="cuda", **sizes) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert [each.error is None for each in found] == [True, False, True]
    assert "NaN or infinity" in str(found[1].error)
    assert [len(each.outputs[0].token_ids) for each in (found[0], found[2])] == [9, 9]


def test_a_store_that_grows_in_place_is_not_that_of_graphs_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, reserve = torch.zeros(1 << 16, dtype=torch.int32), DeviceTokenStore._reserve

    def grow(self: DeviceTokenStore, num_lines: int, width: int) -> None:
        reserve(self, num_lines, width)
        if self._there.data_ptr() != memory.data_ptr():
            shape = self._there.shape
            memory[: shape.numel()] = self._there.flatten()
            self._there = memory[: shape.numel()].view(shape)

    monkeypatch.setattr(DeviceTokenStore, "_reserve", grow)
    found = {}
    for device in ("reference", "cuda"):
        sizes: Any = {"dtype": "float32", "max_model_len": 32, "num_gpu_blocks_override": 40, "max_num_seqs": 20}
        with LLM(str(path), device=device, **sizes) as llm:

            def generate(*counts: int, llm: LLM = llm) -> list[Any]:
                prompts: Any = [{"prompt_token_ids": [5 + row]} for row in range(len(counts))]
                asked = [SamplingParams(temperature=0.0, max_tokens=each, ignore_eos=True) for each in counts]
                return [each.outputs[0].token_ids for each in llm.generate(prompts, asked, use_tqdm=False)]

            # a line for one sequence, lines for more than there is room for, of which the last is free first
            found[device] = [generate(4), generate(*[1] * 16, 2), generate(4)]
    assert found["cuda"] == found["reference"]


def test_steps_of_any_number_of_rows_take_the_graphs_of_few_sizes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.devices.cuda.graphs import GraphedModel

    sizes: set[int] = set()
    taken = GraphedModel._taken

    def noted(self: Any, batch: Any, more: Any = None) -> Any:
        step = taken(self, batch, more)
        if step is not None:
            sizes.add(len(batch.token_ids))
        return step

    monkeypatch.setattr(GraphedModel, "_taken", noted)
    sizes_of_engine = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 64}
    prompts: Any = [{"prompt_token_ids": [5, 6, 7 + row]} for row in range(10)]
    params = [
        SamplingParams(max_tokens=2 + row, ignore_eos=True, seed=row, temperature=float(row % 3)) for row in range(10)
    ]
    found = []
    for device in ("reference", "cuda"):
        with LLM(str(path), device=device, **sizes_of_engine) as llm:
            found.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
    assert sizes == {1, 2, 4, 8, 16}


def test_states_of_rows_that_fill_a_step_up_are_advanced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    path = write_byte_tokenizer(make_checkpoint("lfm2", tmp_path / "model", vocab_size=300))
    kinds: list[dict[str, Any]] = [{"temperature": 0.0, "max_tokens": 4}] * 3
    before = RepeatedCalls.num_replays
    assert generate(path, kinds, device="cuda") == generate(path, kinds, device="reference")
    assert RepeatedCalls.num_replays > before


def test_rows_that_fill_a_step_up_store_no_token(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, filled = CudaSampler.draw, []

    def draw_other_tokens(self: CudaSampler, logits: torch.Tensor, kind: int, asked: torch.Tensor) -> Any:
        if len(logits) == 4:
            filled.append(kind)
            logits = torch.cat((logits[:3], logits[3:].roll(7, dims=1)))
        return draw(self, logits, kind, asked)

    monkeypatch.setattr(CudaSampler, "draw", draw_other_tokens)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0, "max_tokens": 6}] * 3
    assert generate(path, kinds, device="cuda") == generate(path, kinds, device="reference")
    assert filled
