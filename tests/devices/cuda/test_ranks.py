"""Ranks that each have a GPU: in processes, over gloo instead of NCCL, with interpreted kernels."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.whole_engines import core_of

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, LoRARequest, SamplingParams
from octavo.config.schema import DeviceConfig
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.devices import DEVICES
from octavo.devices.cuda.graphs import GraphedModel
from octavo.devices.device import DeviceMemory
from octavo.distributed.process_group import ProcessGroup
from octavo.errors import ConfigError, EngineDeadError
from octavo.executor.multiprocess import MultiprocessExecutor
from octavo.executor.ranks import start_ranks
from octavo.platform import Memory, Platform
from octavo.worker.launching import LaunchingRunner
from octavo.worker.start.loading import Stage
from octavo.worker.worker import Worker
from tests.devices.cuda.interpreted import NAME, InterpretedCuda, RepeatedCalls
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.lora.adapter_folders import LINEAR, make_adapter

SIZES: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 6}
EXACT: Any = SIZES | {"device": "cuda", "batch_invariant": True}
PROMPTS: Any = [{"prompt_token_ids": [5 + i * 7 % 90 for i in range(length)]} for length in (3, 9, 5)]
ASKED = [
    SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.9, seed=1, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.9, seed=2, ignore_eos=True),
]
WAITING = SamplingParams(max_tokens=4, temperature=0.9, seed=6, n=2, ignore_eos=True)
"""Whose steps wait for the host."""
FORMED = SamplingParams(
    max_tokens=3, temperature=0.9, seed=7, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}")
)
"""Whose grammar rank 0 alone has."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # a layer for each of two stages
    return write_byte_tokenizer(
        make_checkpoint("qwen3", tmp_path_factory.mktemp("m") / "model", vocab_size=301, num_hidden_layers=2)
    )


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    start = partial(start_ranks, module="tests.devices.cuda.interpreted_rank")
    monkeypatch.setattr("octavo.executor.ranks.start_ranks", start)
    monkeypatch.setattr(ProcessGroup, "is_recordable", True)  # as in the process of the other rank


def answers(llm: LLM) -> list[Any]:
    found = llm.generate(PROMPTS, ASKED, use_tqdm=False)
    found += llm.generate(PROMPTS[:2], [ASKED[2], WAITING], use_tqdm=False)
    found += llm.generate(PROMPTS[:2], [ASKED[2], FORMED], use_tqdm=False)
    found += llm.generate(PROMPTS[:2], ASKED[1:], use_tqdm=False)
    assert not any(each.error for each in found), found
    return [each.outputs for each in found]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cuda", NAME)
        with LLM(str(path), **EXACT) as llm:
            return answers(llm)


@pytest.mark.parametrize(
    ("sizes", "captured"),
    # three and two rows in a step, or half of them in turns
    [
        ({"tensor_parallel_size": 2, "max_steps_in_flight": 3}, {2, 4}),
        pytest.param({"pipeline_parallel_size": 2}, {1, 2}, marks=pytest.mark.long),
    ],
    ids=["TP", "PP"],
)
def test_two_ranks_give_the_bits_of_one_and_the_end_of_one_is_an_error(
    path: Path, sizes: Any, captured: set[int], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_before = RepeatedCalls.num_replays
    num_waiting = []
    launch = LaunchingRunner.launch
    monkeypatch.setattr(
        LaunchingRunner, "launch", lambda self, step: num_waiting.append(len(self._launched)) or launch(self, step)
    )
    with LLM(str(path), **EXACT, **sizes, distributed_timeout_seconds=20) as llm:
        assert answers(llm) == expected
        assert RepeatedCalls.num_replays > num_before, "steps of ranks are captured, with their calls"
        core = core_of(llm)
        executor = core.executor
        assert isinstance(executor, MultiprocessExecutor)
        assert isinstance(executor._worker, Worker)
        runner = executor._worker._runner
        graphed = runner.model._model if isinstance(runner.model, Stage) else runner.model
        assert isinstance(graphed, GraphedModel)
        if "tensor_parallel_size" in sizes:
            assert isinstance(runner, LaunchingRunner)
            assert 2 in {rows for (rows, *_), step in graphed._steps.items() if step.told is not None}, (
                "a step that asks nothing of the host is a graph with its draws"
            )
            assert max(num_waiting) == 2, "steps are launched before the tokens of two others are known"
        # and one row while a grammar is compiled
        assert captured <= {rows for rows, *_ in graphed._steps} <= captured | {1}, "steps are filled up on all ranks"
        (rank,) = executor._ranks
        assert rank.process is not None
        os.kill(rank.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1 was killed"):
            answers(llm)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # a slot, so that one adapter takes the place of another while a request without one has steps in flight
        pytest.param("llama", {"enable_lora": True, "max_loras": 1}, marks=pytest.mark.long),
        *(pytest.param(each, {}, marks=pytest.mark.long) for each in ("deepseek_v3", "gpt_oss", "qwen3_moe")),
        *(pytest.param(each, {}, marks=pytest.mark.long) for each in ("falcon_h1", "lfm2", "nemotron_h", "qwen3_5")),
        *(pytest.param("qwen3", {"quantization": each}, marks=pytest.mark.long) for each in ("int8", "int4")),
        pytest.param(
            "qwen3",
            {"num_gpu_blocks_override": 4, "preemption_mode": "swap", "swap_space": 1 << 20, "max_model_len": 32},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_two_ranks_give_the_bits_of_one_with_any_model(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1} if family == "llama" else {}
    path = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300, **sizes))
    adapters: list[LoRARequest | None] = [None] * 3
    if "enable_lora" in options:
        for number in (1, 2):
            folder = make_adapter(path, tmp_path / str(number), LINEAR[:1], rank=number, seed=number)
            adapters[number] = LoRARequest(str(number), number, str(folder))
    asked = [
        SamplingParams(temperature=min(1, number), seed=number, max_tokens=count, ignore_eos=True)
        for number, count in enumerate((6, 2, 2))
    ]
    found = []
    for ranks in ({}, {"tensor_parallel_size": 2, "max_steps_in_flight": 3}):
        with LLM(str(path), **{**EXACT, **options, **ranks}) as llm:
            outputs = llm.generate(PROMPTS[:3], asked, use_tqdm=False, lora_request=adapters)
        assert not any(each.error for each in outputs), outputs
        found.append([each.outputs for each in outputs])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("default")
def test_ranks_that_ray_places_are_as_one(path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    from octavo.executor.ray import start_ray_ranks

    monkeypatch.setattr(
        "octavo.executor.ray.start_ray_ranks", partial(start_ray_ranks, module="tests.devices.cuda.interpreted_rank")
    )
    monkeypatch.setattr(InterpretedCuda, "num_gpus", 1)  # that of a rank is the only one that its process sees
    options: Any = {"include_dashboard": False, "logging_level": "error", "log_to_driver": False}
    ray.init(num_cpus=2, num_gpus=2, object_store_memory=80 << 20, **options)
    try:
        with LLM(str(path), **EXACT, tensor_parallel_size=2, executor="ray") as llm:
            assert answers(llm) == expected
    finally:
        ray.shutdown()


def test_fewer_gpus_than_ranks_are_refused_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretedCuda, "num_gpus", 1)
    with pytest.raises(ConfigError, match="needs 2 GPUs on this machine, one for each rank, and 1 can be seen"):
        LLM(str(path), **EXACT, tensor_parallel_size=2)


def test_each_rank_of_each_engine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(InterpretedCuda, "_current", lambda _, index: chosen.append(index))
    config = DeviceConfig(device="cuda", threads=1, tensor_parallel_size=2)
    for place in range(4):
        InterpretedCuda(config, Platform.detect(), "asked for", place)
    assert chosen == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="needs 6 GPUs"):
        InterpretedCuda(config, Platform.detect(), "asked for", 4)
    del chosen[:]
    InterpretedCuda(replace(config, executor="ray"), Platform.detect(), "asked for", 5)
    assert chosen == [0], "a process that Ray's GPU was given to sees no other"


def test_ranks_divide_the_memory_of_the_host_and_not_that_of_their_gpus() -> None:
    gpu = DeviceMemory(80, 70, "device", is_host=False, most_kv_bytes=None)
    assert gpu.share(2) == gpu
    host = DeviceMemory.of_host(Memory(80, 70, "machine"))
    assert host.share(2).available == 35
