"""Adapters of llama.cpp: what its converter makes of an adapter of PEFT computes the same, bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import CheckpointError
from octavo.gguf.layout import adapter_tensors
from octavo.gguf.reader import read_gguf
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gguf_files import Stored, convert, gguf_bytes, permuted, plain
from tests.lora.adapted_run import AdaptedRun
from tests.lora.adapter_folders import ATTENTION, LINEAR, make_adapter

PROMPT = list(range(3, 24))
NAMES = {
    **{f"{each}_proj": f"attn_{each}" for each in "qkv"},
    "o_proj": "attn_output",
    **{f"{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    "c_fc": "ffn_up",
    "c_proj": "ffn_down",
}


def as_gguf(base: Path, folder: Path, path: Path, *, is_permuted: bool, **metadata: Any) -> Path:
    """Write an adapter of PEFT as llama.cpp's converter does. metadata: beside or in place of its own."""
    config = json.loads((base / "config.json").read_text())
    stored: dict[str, Stored] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        found = re.fullmatch(r".*layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])\.weight", name)
        assert found, name
        if is_permuted and found[3] == "B" and found[2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if found[2] == "q_proj" else "num_key_value_heads"]
            tensor = permuted(tensor, heads)
        stored[f"blk.{found[1]}.{NAMES[found[2]]}.weight.lora_{found[3].lower()}"] = plain(tensor)
    alpha = float(json.loads((folder / "adapter_config.json").read_text())["lora_alpha"])
    own = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha, **metadata}
    path.write_bytes(gguf_bytes({name: each for name, each in own.items() if each is not None}, stored))
    return path


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [("llama", LINEAR), ("qwen3", LINEAR), ("starcoder2", (*ATTENTION, "c_fc", "c_proj"))],
)
def test_adapter_of_llama_cpp_computes_what_that_of_peft_does(
    architecture: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = make_checkpoint(architecture, tmp_path / "base")
    folder = make_adapter(base, tmp_path / "adapter", targets, rank_pattern={"k_proj": 8})
    is_permuted = architecture == "llama"
    file = as_gguf(base, folder, tmp_path / "a.gguf", is_permuted=is_permuted, **{"general.architecture": architecture})
    for model in (base, convert(base, architecture)):
        run = AdaptedRun(model, [folder, file])
        expected = run.logits([("x", PROMPT, 1)])["x"]
        assert torch.equal(run.logits([("x", PROMPT, 2)])["x"], expected)
        assert not torch.equal(run.logits([("x", PROMPT, 0)])["x"], expected)


def test_adapter_without_alpha_is_added_as_it_is(tmp_path: Path) -> None:
    base = make_checkpoint("qwen3", tmp_path / "base")
    ranks = {"rank_pattern": {"k_proj": 8}, "alpha_pattern": {"k_proj": 8}}
    folder = make_adapter(base, tmp_path / "adapter", lora_alpha=4, **ranks)
    own = {"general.architecture": "qwen3", "adapter.lora.alpha": None}
    run = AdaptedRun(base, [folder, as_gguf(base, folder, tmp_path / "a.gguf", is_permuted=False, **own)])
    assert torch.equal(*(run.logits([("x", PROMPT, slot)])["x"] for slot in (1, 2)))


def test_adapter_of_layers_in_another_order_is_refused_and_of_others_read(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.gguf", plain(torch.zeros(1, 8))
    tensors = {"blk.0.attn_q.weight.lora_a": rows, "blk.1.ssm_out.weight.lora_a": rows}
    path.write_bytes(gguf_bytes({"general.architecture": "qwen35"}, tensors))
    found = adapter_tensors(read_gguf(path), "Qwen3_5ForCausalLM")
    assert next(found)[:2] == ("octavo.layers.0.self_attn.q_proj", "A")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ssm_out\.weight\.lora_a .*; give the adapter in the layout of"):
        next(found)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.type": "model"}, {}, "general.type is 'model', expected adapter; give an adapter"),
        ({"adapter.type": "other"}, {}, "adapter.type is 'other', expected lora"),
        ({"adapter.alora.invocation_tokens": [1]}, {}, "expected an adapter for all tokens"),
        ({"general.architecture": "unknown"}, {}, "general.architecture is 'unknown', expected one of"),
        (
            {"general.architecture": "qwen3"},
            {},
            "is 'qwen3', expected llama or exaone or internlm2, as LlamaForCausalLM has; give an adapter of this model",
        ),
        ({}, {f"blk.{'9' * 5000}.attn_q.weight.lora_a": plain(torch.zeros(1, 8))}, "attn_q.weight.lora_a is no A or B"),
        ({"adapter.lora.alpha": "x"}, {}, "adapter.lora.alpha is 'x', expected a number"),
        ({}, {"blk.0.attn_q.weight.lora_a": ("Q8_0", (1, 32), bytes(34))}, "stored as Q8_0, .*; convert the adapter"),
        ({}, {"blk.0.attn_q.weight.lora_b": plain(torch.zeros(7, 1))}, "has 7 rows, expected 4 heads"),
        ({}, {"token_embd.weight.lora_a": plain(torch.zeros(1, 8))}, "token_embd.weight.lora_a is no A or B"),
        ({}, {"blk.0.ffn_up_exps.weight.lora_a": plain(torch.zeros(2, 1, 8))}, "ffn_up_exps.weight.lora_a is no A"),
        ({}, {}, "holds no tensors"),
    ],
)
def test_what_is_no_adapter_of_the_model_is_refused(
    metadata: dict[str, Any], tensors: dict[str, Stored], message: str, tmp_path: Path
) -> None:
    own = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", **metadata}
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(own, tensors))
    why = AdaptedRun(make_checkpoint("llama", tmp_path / "base")).read(path)
    assert why.startswith(f"{path}: ")
    assert re.search(message, why)
