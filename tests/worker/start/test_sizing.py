"""KV caches that follow from what the largest steps take, on a device that says what that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.cli.explain import prepared
from octavo.config.schema import SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.devices import DEVICES
from octavo.devices.device import MemoryUse
from octavo.errors import ConfigError
from octavo.worker.drafting.drafter import Drafter
from octavo.worker.model_runner import ModelRunner
from octavo.worker.start.warm_up import WarmUp
from octavo.worker.worker import Worker
from tests.config.test_explain import PLAN
from tests.distributed.threads import thread_meshes
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.measured_device import NAME, MeasuredDevice
from tests.fakes.rank_threads import ThreadRanks
from tests.worker.engine_config import make_config
from tests.worker.prefix_model import BLOCK_SIZE, make_runner

FREE = 8 << 20
LOADED = 1 << 20
"""What loading takes of it."""
GRAPH = 3 << 10
SIZES: Any = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 48, "max_num_batched_tokens": 48}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(DEVICES, "reference", NAME)
    uses(monkeypatch, peak=5 << 20)
    return write_byte_tokenizer(make_checkpoint("qwen3", tmp_path / "model", vocab_size=300))


def uses(monkeypatch: pytest.MonkeyPatch, peak: int, graphs: int = 0) -> None:
    """Let steps take so much. graphs: what those take that are captured to see what one takes."""
    monkeypatch.setattr(MeasuredDevice, "frees", [FREE, FREE - LOADED])
    monkeypatch.setattr(MeasuredDevice, "uses", [MemoryUse(0, 7), MemoryUse(0, 7 + graphs), MemoryUse(peak, 0)])


def started(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="reference", **(SIZES | options))


def worker_of(llm: LLM) -> Worker:
    worker = llm.engine.core.executor  # type: ignore[attr-defined]
    assert isinstance(worker, Worker)
    return worker


def test_the_cache_has_what_the_largest_steps_leave(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt: Any = {"prompt_token_ids": [5, 6, 7]}
    asked = SamplingParams(max_tokens=4, temperature=0.9, seed=1, ignore_eos=True)
    # rows of 48, 24 and 12 have a graph of another size below them
    uses(monkeypatch, peak=5 << 20, graphs=3 * GRAPH)
    monkeypatch.setattr(MeasuredDevice, "most_graphs", 10)
    num_released = MeasuredDevice.num_released
    with started(path) as llm:
        plan = worker_of(llm).plan
        block_bytes = plan.cache.block_bytes
        steps_bytes = LOADED + (5 << 20) - 3 * block_bytes - plan.weights_bytes
        assert plan.activation_bytes == steps_bytes + 10 * GRAPH
        assert plan.limit == int(0.9 * FREE)
        left = plan.limit - plan.weights_bytes - plan.activation_bytes
        assert plan.cache.num_blocks == left // block_bytes - 1
        (line,) = [each for each in plan.render().splitlines() if "activations" in each and "measured" in each]
        assert "30.00 KiB of it for graphs yet to be captured" in line
        assert MeasuredDevice.num_released - num_released == 2, "what loading left, and the small caches are given back"
        found = llm.generate([prompt], asked, use_tqdm=False)[0].outputs
        worker_of(llm).release_memory([[]])
        assert MeasuredDevice.num_released - num_released == 2, "what was measured stays while nothing runs"
    monkeypatch.setattr(MeasuredDevice, "warms_up", False)
    monkeypatch.setattr(MeasuredDevice, "frees", [16 * FREE])
    with started(path) as llm:
        assert llm.generate([prompt], asked, use_tqdm=False)[0].outputs == found
        assert "measured" not in worker_of(llm).plan.render()


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "qwen3_5", "gpt2"])
def test_models_of_every_kind_make_these_steps(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, latents and experts, recurrent states, learned positions."""
    uses(monkeypatch, peak=1 << 20)
    monkeypatch.setitem(DEVICES, "reference", NAME)
    path = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300))
    found = []
    for is_measured in (True, False):
        monkeypatch.setattr(MeasuredDevice, "warms_up", is_measured)
        monkeypatch.setattr(MeasuredDevice, "frees", [16 * FREE])
        with started(path, max_num_seqs=9) as llm:
            assert ("measured" in worker_of(llm).plan.render()) is is_measured
            asked = SamplingParams(max_tokens=4, temperature=0.9, seed=1, ignore_eos=True)
            prompt: Any = {"prompt_token_ids": [5, 6, 7]}
            found.append(llm.generate([prompt], asked, use_tqdm=False)[0].outputs)
    assert found[0] == found[1]


def test_a_draft_model_guesses_in_these_steps(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted: list[int] = []
    guess = Drafter._guess
    monkeypatch.setattr(MeasuredDevice, "lacks", {})
    monkeypatch.setattr(
        Drafter, "_guess", lambda self, spans, hidden: drafted.append(len(spans)) or guess(self, spans, hidden)
    )
    draft = write_byte_tokenizer(make_checkpoint("llama", tmp_path / "draft", vocab_size=300))
    uses(monkeypatch, peak=1 << 20)
    speculates: Any = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with started(path, speculative_config=speculates) as llm:
        assert max(drafted) == 48 // 4, "as many rows as a step verifies"
        assert worker_of(llm).plan.activation_bytes > 1 << 20


def test_what_explain_shows_is_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredDevice, "frees", [16 * FREE])
    ((shown,), _, _) = prepared(make_config(path, device="reference"))
    (line,) = [each for each in shown.render().splitlines() if "at start it is measured" in each]
    assert "activations" in line
    assert " 0 B" not in line


@pytest.mark.parametrize("given", [{"num_gpu_blocks_override": 740}, {"kv_cache_memory": 740 << 13}])
def test_a_size_that_is_given_may_take_what_is_there(path: Path, monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    uses(monkeypatch, peak=1 << 20)
    with started(path, **given) as llm:
        plan = worker_of(llm).plan
        assert plan.num_blocks_because in given
        assert plan.planned_bytes > 0.9 * FREE
        assert plan.planned_bytes <= plan.limit == FREE
        assert plan.limit_because == "what the device has available: the KV cache is given"
    with pytest.raises(ConfigError, match="leave|room for"):
        started(path, **{name: value * 2 for name, value in given.items()})


def test_weights_that_do_not_fit_are_refused_before_they_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredDevice, "frees", [128 << 10])
    monkeypatch.setattr("octavo.worker.start.loading.RankParts.load", None)
    with pytest.raises(
        ConfigError, match=r"weights take 17.\.\d\d KiB, more than 115.20 KiB \(.*quantization int8 or int4"
    ):
        started(path)


def test_steps_that_leave_no_block_are_refused_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uses(monkeypatch, peak=7 << 20)
    with pytest.raises(ConfigError, match=r"of one step 7\.\d+ MiB \(measured: .*\) leave too little of 7.20 MiB"):
        started(path)


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_step_without_room_is_refused_by_number(path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    # num_before: pairs of caches with which all steps fit
    runners: list[ModelRunner] = []
    execute = ModelRunner.execute

    def executed(self: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        if self not in runners:
            runners.append(self)
        if len(runners) > num_before:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB.")
        return execute(self, step)

    monkeypatch.setattr(ModelRunner, "execute", executed)
    kv_bytes = r"24\.00 KiB" if not num_before else r"\d+\.\d+ MiB"
    expected = rf"in a step of 48 tokens of 48 sequences, beside weights of .* and KV caches of {kv_bytes}: lower .*"
    expected += r"; PyTorch says: CUDA out of memory\. Tried to allocate 2\.00 GiB$"
    with pytest.raises(ConfigError, match=expected):
        started(path)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_ranks_measure_the_same_steps(path: Path, tensor: int, pipeline: int) -> None:
    """Ranks whose steps differ would wait for each other's calls without end."""
    sizes: Any = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    config = make_config(path, device="reference", **(SIZES | {"max_num_seqs": 4}), **sizes)
    MeasuredDevice.uses[:] = [MemoryUse(5 << 20, 0)]
    ranks = ThreadRanks(config, thread_meshes(tensor, pipeline))
    try:
        plans = ranks.call("prepare")
        assert [each.activation_bytes for each in plans] == [0, 0]
        for plan in ranks.call("load", 128, [0]):
            assert 0 < plan.activation_bytes < 7 << 20
        assert ranks.call("allocate", [20], [0]) == [None, None]
    finally:
        ranks.shutdown()


class Recording:
    """A runner that notes the steps with rows."""

    def __init__(self) -> None:
        self._runner, _ = make_runner(num_blocks=2)
        self.parts = self._runner.parts
        self.steps: list[SchedulerOutput] = []

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.rows:
            self.steps.append(step)
        return self._runner.execute(step)


def test_the_largest_steps_have_every_size_and_every_way_to_draw() -> None:
    runner: Any = Recording()
    plan = msgspec.structs.replace(PLAN, cache=CacheLimits.of_one_group(2, BLOCK_SIZE))
    scheduler = SchedulerConfig(max_model_len=50, max_num_seqs=16, max_num_batched_tokens=40)
    taken = iter([MemoryUse(0, 10), MemoryUse(0, 10 + 2 * 9 - 1)])
    assert WarmUp(runner, scheduler, plan, 50, num_drafts=3).measure(lambda: next(taken)) == 9, (
        "graphs of 12 and 6 rows, rounded up"
    )
    prompts, plain, several, beams, described, verified, again, *decodes = runner.steps
    assert (len(prompts.rows), prompts.num_tokens) == (16, 40)
    assert [len(each.rows) for each in (plain, several, beams, described)] == [16, 16, 16, 1]
    assert {each.num_samples for each in several.rows} == {2}
    assert {each.num_candidates for each in beams.rows} == {20}
    assert [(each.num_tokens, each.num_prompt_logprobs) for each in described.rows] == [(40, 39)]
    assert [len(each.drafts) for each in verified.rows] == [3] * 10, "40 tokens, four of each row"
    assert again == verified
    assert [len(each.rows) for each in decodes] == [16] * 4 + [8, 8, 4, 4, 2, 2, 1, 1] + [12, 12, 6, 6]
    lengths = [max(row.start + 1 for row in each.rows) for each in decodes]
    assert lengths == [50] * 12 + [1] * 4, "the longest, and for graphs alone the shortest"
