"""Hy4: names of transformers' class, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import CheckpointError, ConfigError
from octavo.models.loader import LoadedModel
from tests.fakes.checkpoints import edit_config, load_oracle, make_checkpoint
from tests.fakes.vision import make_vision_checkpoint
from tests.models.loading import read_config
from tests.models.paged_run import load, logits_of

TOKENS = [3 + 7 * each % 120 for each in range(40)]


def test_names_of_the_release_and_of_transformers_class_mean_the_same(tmp_path: Path) -> None:
    path = make_checkpoint("hy_v4", tmp_path)
    expected, own = logits_of(load(path), TOKENS), load_oracle(path).state_dict()
    assert "model.layers.0.hc_pre.hc_attn_layer.hc_fn" in load_file(path / "model.safetensors")
    assert {"model.layers.0.attn_hc.fn", "model.layers.0.self_attn.sinks"} <= own.keys()
    made = {name: each.contiguous() for name, each in own.items()}
    made["model.mtp_layers.0.norm.weight"] = torch.ones(2)
    save_file(made, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits_of(load(path), TOKENS), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swiglu_limit", 0.0),
        ("index_topk", 0),
        ("index_head_dim", 4),
        ("indexer_types", ["shared", "full", "full"]),
        ("layer_types", ["full_attention"] * 3),
        ("hc_magnitude", 0.0),
        ("num_key_value_heads", 2),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    path = make_checkpoint("hy_v4", tmp_path)
    edit_config(path, **{name: value})
    with pytest.raises(CheckpointError, match=name):
        read_config(path)


def test_heads_of_keys_that_the_model_with_images_states_mean_nothing(tmp_path: Path) -> None:
    path = make_vision_checkpoint("hy_v4_vl", tmp_path)
    expected, text = logits_of(load(path), TOKENS), Checkpoint.open(path).stored.values["text_config"]
    edit_config(path, text_config={**text, "num_key_value_heads": 2})
    assert torch.equal(logits_of(load(path), TOKENS), expected)


def test_a_stage_chooses_for_its_first_layer(tmp_path: Path) -> None:
    path = make_checkpoint("hy_v4", tmp_path, indexer_types=["full", "shared", "shared"])
    with pytest.raises(ConfigError, match="pipeline_parallel_size: layer 2 attends to the tokens that layer 0 chooses"):
        LoadedModel.open(Checkpoint.open(path), Mesh(pipeline=Axis(1, 2)))
