"""Architectures without a file run by transformers' code in the whole engine, as every family does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.config.checkpoint import Checkpoint
from octavo.core.outputs import CompletionOutput
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.models.fallback import proof
from octavo.models.fallback.library import open_library
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import edit_config, edit_tensors, load_oracle
from tests.fakes.strangers import make_stranger

STRANGERS = ["persimmon", "beam"]
"""One whose layers see all; a mixture of experts in which layers with a window alternate with those."""
SHARED = [(7 * i) % 290 + 5 for i in range(40)]
PROMPTS = [[*SHARED[:length], 11 + length] for length in (3, 40, 33, 17)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1, prompt_logprobs=1, ignore_eos=True)


def load(path: Path, **options: Any) -> LLM:
    """Start an engine, which finds the verdict on its class beside the model if another one has started there."""
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    common["packed_cache"] = str(path / "kept")
    return LLM(str(path), **{"num_gpu_blocks_override": 64, **common, **options})


def answers(llm: LLM, prompts: list[list[int]]) -> list[CompletionOutput]:
    return [each.outputs[0] for each in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module", params=STRANGERS)
def stranger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_stranger(request.param, tmp_path_factory.mktemp(request.param))
    write_byte_tokenizer(path)
    return path


def test_other_weights_give_what_an_engine_that_starts_with_them_gives(stranger: Path, tmp_path: Path) -> None:
    other, wider = shutil.copytree(stranger, tmp_path / "other"), shutil.copytree(stranger, tmp_path / "wider")
    tensors = load_file(other / "model.safetensors")
    edit_tensors(other, **{name: each * 1.5 for name, each in tensors.items() if re.search("o_proj|dense", name)})
    edit_config(other, transformers_version="4.1.0", use_cache=False)
    edit_config(wider, rms_norm_eps=0.125, layer_norm_eps=0.125)
    with load(stranger, enable_sleep_mode=True) as llm:
        before = answers(llm, PROMPTS)
        with pytest.raises(ConfigError, match="has another model"):
            llm.update_weights_from_disk(wider)
        llm.update_weights_from_disk(other)
        after = answers(llm, PROMPTS)
    with load(other) as llm:
        assert after == answers(llm, PROMPTS) != before


@pytest.fixture(scope="module")
def alone(stranger: Path) -> list[CompletionOutput]:
    with load(stranger, enable_prefix_caching=False) as llm:
        found = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert answers(llm, PROMPTS) == found, "in a batch, cut in pieces"
    return found


def test_greedy_text_is_that_of_transformers(stranger: Path, alone: list[CompletionOutput]) -> None:
    oracle = load_oracle(stranger)
    for prompt, found in zip(PROMPTS, alone, strict=True):
        known = prompt + list(found.token_ids)
        with torch.inference_mode():
            logits = oracle(torch.tensor([known])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert found.logprobs is not None
        for row, token, listed in zip(expected, found.token_ids, found.logprobs, strict=True):
            assert listed[token].logprob == pytest.approx(float(row[token]), abs=1e-5 * float(logits.abs().max()))
            assert row.max() - row[token] < 1e-4


def test_prefix_hits_and_preemption_give_the_same_bits(stranger: Path, alone: list[CompletionOutput]) -> None:
    with load(stranger, num_gpu_blocks_override=6, max_model_len=80, max_num_seqs=4) as llm:
        assert answers(llm, PROMPTS) == alone
        assert llm.engine.stats.num_preemptions > 0
        # log-probabilities of a prompt are computed, not found in the cache
        params = msgspec.structs.replace(GREEDY, prompt_logprobs=None)
        assert [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS] == alone
        assert llm.engine.stats.num_cached_tokens > 0


def test_explain_says_that_the_class_is_proved(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(stranger), "--max-model-len", "64", "--num-gpu-blocks-override", "16"]) == 0
    assert re.search(r"model +fallback +proved: at most \d\.\de-\d\d from eager", capsys.readouterr().out)


def test_quantised_weights_load_and_answer(stranger: Path) -> None:
    with load(stranger, quantization="int8") as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS[:2]]
        assert answers(llm, PROMPTS[:2]) == alone


def test_the_verdict_is_kept_and_what_was_refused_is_refused_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, cache = make_stranger("persimmon", tmp_path / "model"), tmp_path / "cache"
    write_byte_tokenizer(path)
    found: list[proof.Verdict] = []
    find = proof._find
    monkeypatch.setattr(proof, "_find", lambda *arguments: found.append(find(*arguments)) or found[-1])
    options = {"packed_cache": str(cache), "packed_cache_size": "1GiB"}
    capfd.readouterr()
    for _ in range(2):
        load(path, **options).close()
    assert "Writing model shards" not in capfd.readouterr().err
    assert len(found) == 1
    (kept,) = cache.glob("proofs-*/*.json")
    kept.write_text('{"error": 0.5, "refused": "it differs"}')
    with pytest.raises(UnsupportedModel, match="PersimmonForCausalLM .* refused: it differs"):
        load(path, **options)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, float], type[Exception], str]] = {
    "what computes otherwise": (
        {}, {}, {"TOLERANCE": 1e-12}, UnsupportedModel,
        r"PersimmonForCausalLM .*is refused: it is .* from eager attention",
    ),
    "a small copy that is not small": (
        {}, {}, {"_MOST_PARAMETERS": 100}, UnsupportedModel,
        r"its small copy has [\d,]+ parameters, at most 100 are run",
    ),
    "absurdly many layers": (
        {"num_hidden_layers": 1_000_000}, {}, {}, CheckpointError,
        "num_hidden_layers is 1000000, expected an integer of at most 1024",
    ),
    **{
        each: ({}, {each: 2}, {}, ConfigError, f"{each} is 2, expected 1: PersimmonForCausalLM runs by transformers'")
        for each in ("tensor_parallel_size", "pipeline_parallel_size")
    },
    "layers with states": (
        {"layer_types": ["linear_attention"] * 3}, {}, {}, UnsupportedModel,
        "no family for PersimmonForCausalLM, and its layer_types has linear_attention, expected",
    ),
    "code of a checkpoint": (
        {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}, {}, {},
        UnsupportedModel, "no model family Own .*auto_map names code .*whatever trust_remote_code",
    ),
}  # fmt: skip
"""By what is refused: keys of the config, options of the engine, limits of the proof, and the error."""


@pytest.fixture(scope="module")
def persimmon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_byte_tokenizer(make_stranger("persimmon", tmp_path_factory.mktemp("persimmon")))
    (path / "own.py").write_text("raise AssertionError('code of a checkpoint was run')")
    return path


@pytest.mark.parametrize(("changes", "options", "limits", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_run_is_refused_by_name(
    persimmon: Path, changes: dict[str, Any], options: dict[str, Any], limits: dict[str, float],
    error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = shutil.copytree(persimmon, tmp_path / "model")
    edit_config(path, **changes)
    for name, value in limits.items():
        monkeypatch.setattr(proof, name, value)
    with pytest.raises(error, match=message):
        load(path, **options)


def test_layers_of_different_sizes_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.dots3_note", reason="transformers has no such class yet")
    config = {"architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="num_attention_heads of Dots3NoteForCausalLM is not one number"):
        open_library(Checkpoint.open(tmp_path))


def test_a_recurrent_model_is_refused_by_its_architecture(tmp_path: Path) -> None:
    config = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "hidden_size": 32, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "state_size": 8}))
    with pytest.raises(UnsupportedModel, match="RwkvForCausalLM"):
        load(tmp_path, load_format="dummy", tokenizer="octavo-tiny", packed_cache="none")
