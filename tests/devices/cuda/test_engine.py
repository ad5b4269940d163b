"""The whole engine on the device cuda with its kernels interpreted: the text of the reference, and its own bits in any
schedule."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, SamplingParams
from octavo.core.step import SchedulerOutput
from octavo.devices import DEVICES
from octavo.scheduler.preemption import Preemption
from octavo.worker.launching import LaunchingRunner
from tests.devices.cuda.interpreted import NAME, InterpretedCuda
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

SMALL: Any = {"vocab_size": 300, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS: Any = [{"prompt_token_ids": [5 + i * 7 % 90 for i in range(length)]} for length in (15, 31)]
PARAMS = SamplingParams(max_tokens=3, temperature=0.9, seed=1, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of two heads: the interpreter runs one program after the other, for each token and head."""
    return write_byte_tokenizer(make_checkpoint("qwen3", tmp_path_factory.mktemp("m") / "model", **SMALL))


def generate(path: Path, max_tokens: int = 3, **args: Any) -> list[tuple[Any, Any]]:
    sizes = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 4}
    with LLM(str(path), **{**sizes, **args}) as llm:
        outputs = llm.generate(PROMPTS, msgspec.structs.replace(PARAMS, max_tokens=max_tokens), use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize("is_invariant", [False, True])
def test_text_of_several_layers_and_heads_is_the_references(
    is_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    model = write_byte_tokenizer(make_checkpoint("qwen3", tmp_path / "model", vocab_size=300))
    expected = [tokens for tokens, _ in generate(model, device="reference")]
    found = generate(model, device="cuda", batch_invariant=is_invariant)
    assert [tokens for tokens, _ in found] == expected


def test_the_bits_are_those_of_any_schedule(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    found = generate(path, device="cuda", batch_invariant=True)
    assert generate(path, device="cuda", batch_invariant=True, max_num_seqs=1) == found
    assert generate(path, device="cuda", batch_invariant=True, max_num_batched_tokens=5) == found
    reasons: list[str] = []
    preempt = Preemption.preempt

    def noted(self: Preemption, group: Any, plan: Any = None, because: str = "") -> None:
        reasons.append(because)
        preempt(self, group, plan, because)

    monkeypatch.setattr(Preemption, "preempt", noted)
    assert generate(path, device="cuda", batch_invariant=True, num_gpu_blocks_override=4) == found
    assert reasons


def test_a_prefix_that_is_found_changes_no_bit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    with LLM(str(path), device="cuda", batch_invariant=True, dtype="float32", max_model_len=64) as llm:
        first, second = (llm.generate(PROMPTS[1:], PARAMS, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 30)
    assert [each.token_ids for each in first.outputs] == [each.token_ids for each in second.outputs]
    assert [each.logprobs for each in first.outputs] == [each.logprobs for each in second.outputs]


def test_a_schedule_gives_the_same_bits_without_batch_invariance(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[tuple[int, int]]] = []
    launch = LaunchingRunner.launch

    def noted(self: LaunchingRunner, step: SchedulerOutput) -> Any:
        if step.rows:
            steps.append([(row.start, row.num_tokens) for row in step.rows])
        return launch(self, step)

    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(LaunchingRunner, "launch", noted)
    prompts: Any = [{"prompt_token_ids": [5 + i * 7 % 90 for i in range(length)]} for length in (19, 3)]
    sizes: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8, "max_num_batched_tokens": 20}
    runs = []
    with LLM(str(path), device="cuda", max_num_seqs=4, enable_prefix_caching=False, **sizes) as llm:
        for _ in range(2):  # the second time memory holds what the first has left, and steps are captured
            found = llm.generate(prompts, PARAMS, use_tqdm=False)
            runs.append((steps, [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]))
            steps = []
    assert max(sum(count for _, count in step) for step in runs[0][0]) > 16, "no product was cuBLAS's on a GPU"
    assert runs[1] == runs[0]


def test_guesses_need_bits_that_do_not_depend_on_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    speculates: Any = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(Exception, match="speculative_config is set, but .* device cuda"):
        generate(path, device="cuda", speculative_config=speculates)
    plain = generate(path, device="cuda", batch_invariant=True)
    assert generate(path, device="cuda", batch_invariant=True, speculative_config=speculates) == plain


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_5", "falcon_h1", "lfm2", "opt"]
)
def test_other_families_have_the_references_text(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    model = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300))
    expected, found = ([tokens for tokens, _ in generate(model, device=name)] for name in ("reference", "cuda"))
    assert found == expected


def test_an_engine_that_ends_gives_its_memory_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.worker.cache_engine import CacheEngine

    alive: list[bool] = []

    def release_idle(self: Any) -> None:
        gc.collect()
        alive.append(any(type(each) is CacheEngine for each in gc.get_objects()))

    monkeypatch.setitem(DEVICES, "cuda", NAME)
    monkeypatch.setattr(InterpretedCuda, "release_idle", release_idle)
    gc.collect()
    with LLM(str(path), device="cuda", dtype="float32", max_model_len=64, num_gpu_blocks_override=8) as llm:
        llm.generate(["a"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert alive == [False]


def test_an_engine_that_sleeps_gives_its_memory_back_and_captures_its_steps_with_other_weights(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.models.decoder import DecoderStack
    from octavo.worker.cache_engine import CacheEngine

    other = write_byte_tokenizer(make_checkpoint("qwen3", tmp_path / "other", seed=1, **SMALL))
    args: Any = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32, "max_num_seqs": 4}
    params, prompts = msgspec.structs.replace(PARAMS, max_tokens=6), PROMPTS[:1]
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    gc.collect()
    with LLM(str(path), device="cuda", batch_invariant=True, enable_sleep_mode=True, **args) as llm:
        before = [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]
        llm.sleep()
        gc.collect()
        kept = [each for each in gc.get_objects() if issubclass(type(each), CacheEngine | DecoderStack)]
        assert [type(each) for each in kept if _takes_memory(each)] == []
        llm.update_weights_from_disk(other)
        found = [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]
        llm.update_weights_from_disk(path)
        assert [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)] == before
    with LLM(str(other), device="cuda", batch_invariant=True, **args) as llm:
        assert [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)] == found != before


def _takes_memory(kept: Any) -> bool:
    return not hasattr(kept, "parameters") or any(each.device.type != "meta" for each in kept.parameters())
