"""Adapters as PEFT makes, saves and computes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.lora.adapted_run import AdaptedRun

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore"),  # what PEFT uses of transformers is deprecated there
]

PROMPT = list(range(3, 24))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("llama", {"target_modules": r".*\.1\.self_attn\.(q|v)_proj", "alpha_pattern": {"v_proj": 3}}),
        ("qwen3", {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"layers.1.mlp.up_proj": 7}}),
        ("gemma3n", {"target_modules": ["q_proj", "gate_proj", "linear_right", "per_layer_input_gate"]}),
        ("kimi_linear", {"target_modules": ["k_proj", "g_b_proj", "f_a_proj", "b_proj", "o_proj"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_adapters_compute_what_peft_does(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_checkpoint(family, tmp_path / "base")
    model = get_peft_model(load_oracle(base), LoraConfig(r=4, lora_alpha=6, **config))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    found = AdaptedRun(base, [tmp_path / "adapter"]).logits([("x", PROMPT, 1)])["x"]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
