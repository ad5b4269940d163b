"""GLM-5.3-Flash: the release's config, transformers' names, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError
from tests.fakes.checkpoints import edit_config, load_oracle, make_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(40)]


def logits(path: Path) -> torch.Tensor:
    return logits_of(load(path), TOKENS)


def text_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config["text_config"]


def test_the_section_of_layers_with_states_means_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("glm5_next", tmp_path)
    expected, text = logits(path), text_config(path)
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names |= {"short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound"}
    section = {name: text.pop(own) for name, own in names.items()}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    edit_config(path, text_config={**text, "linear_attn_config": section, "layer_types": kinds})
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits(path), expected)
    assert "visual" in caplog.text


def test_names_of_transformers_class_mean_the_same(tmp_path: Path) -> None:
    path = make_checkpoint("glm5_next", tmp_path)
    expected, own, stored = logits(path), load_oracle(path).state_dict(), load_file(path / "model.safetensors")
    assert any("self_attn.forget_gate." in name for name in own)
    assert "model.language_model.layers.0.hc_attn_fn" in stored
    # convolutions of queries, keys and values are joined in memory alone
    made = {name: each for name, each in own.items() if ".conv1d." not in name}
    made |= {name: each for name, each in stored.items() if "_conv1d." in name}
    save_file({name: each.contiguous() for name, each in made.items()}, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(path), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index_kpool_always_select_tail", False),
        ("index_topk", 13),
        ("indexer_types", ["full", "shared", "full"]),
        ("layer_types", ["linear_attention"] * 2),
        ("linear_lower_bound", 1.0),
        ("num_key_value_heads", 2),
        ("qk_rope_head_dim", 4),
        ("hc_mult", 0),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint("glm5_next", tmp_path)
    edit_config(path, text_config={**text_config(path), name: value})
    with pytest.raises(CheckpointError, match=name):
        read_config(path)


def test_a_bound_of_decays_is_named_where_it_stands(tmp_path: Path) -> None:
    path = make_checkpoint("glm5_next", tmp_path)
    edit_config(path, text_config={**text_config(path), "linear_attn_config": {"gate_lower_bound": 1.0}})
    with pytest.raises(CheckpointError, match=r"linear_attn_config\.gate_lower_bound is 1\.0"):
        read_config(path)


def test_a_layer_with_a_state_needs_no_choice(tmp_path: Path) -> None:
    path = make_checkpoint("glm5_next", tmp_path)
    expected = logits(path)
    edit_config(path, text_config={**text_config(path), "indexer_types": ["shared", "full", "shared"]})
    assert torch.equal(logits(path), expected)
