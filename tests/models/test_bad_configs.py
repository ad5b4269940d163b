"""What no model can be built of is refused by name when it is opened, whatever the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.loader import LoadedModel
from octavo.ops.registry import bind
from tests.fakes.checkpoints import FAMILIES, edit_config, edit_tensors, family_config, make_checkpoint

BAD: dict[str, list[Any]] = {
    "num_attention_heads": [0, "4"],
    "num_key_value_heads": [-1],
    "head_dim": [7],
    "hidden_size": [0, "big"],
    "num_hidden_layers": [0, 1.5],
    "vocab_size": [0],
    "rms_norm_eps": [-1.0, "small"],
    "layer_norm_eps": [-1.0],
    "layer_norm_epsilon": [-1.0],
    "norm_epsilon": [-1.0],
    "norm_eps": [-1.0],
    "layer_types": [["hyper_attention"] * 9, "full_attention", [None]],
    "rope_parameters": [{"rope_type": "magic"}, "yarn"],
    "hidden_act": ["xyz"],
    "activation_function": ["xyz"],
    "max_position_embeddings": [0, "x"],
    "tie_word_embeddings": ["yes"],
    "num_experts": [0, "a"],
    "num_experts_per_tok": [0, 99, "2"],
    "attn_layer_indices": ["all"],
    "top_k_experts": [0, 99],
    "n_group": [7],
    "kv_lora_rank": [0, "a"],
}
ALSO_NAMED = {"rope_parameters": "rope_type", "num_local_experts": "num_experts", "num_experts": "num_local_experts"}
NOT_READ = {
    ("gemma4", "num_experts"),
    ("gemma4", "top_k_experts"),
    ("gpt_neox", "head_dim"),
    ("granitemoehybrid", "rope_parameters"),
    ("youtu", "head_dim"),
}

QUICK = ("gemma3", "gpt2", "llama", "qwen3_moe", "youtu")
"""One of each kind; the others, which share their parts, are run with the long tests."""


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_a_value_that_no_model_can_have_is_named(family: str) -> None:
    config = json.loads(family_config(family).to_json_string(use_diff=False))
    for field, values in BAD.items():
        for value in values if field in config and (family, field) not in NOT_READ else ():
            checkpoint = Checkpoint(Path(__file__).parent, {**config, field: value})
            with pytest.raises(CheckpointError, match=f"{field}|{ALSO_NAMED.get(field, field)}"):
                LoadedModel.open(checkpoint, Mesh.single())


def load(path: Path) -> None:
    LoadedModel.open(Checkpoint.open(path), Mesh.single()).load(bind(), ReferenceBackend())


def test_an_expert_without_a_tensor_is_named(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    edit_tensors(path, remove=(name,))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.2\.up_proj\.weight is missing"):
        load(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"moe_intermediate_size": 16}, r"experts\.0\.\w+\.weight has shape .*, config.json requires"),
        ({"num_local_experts": 7}, r"mlp\.gate\.weight has shape \[6, 32\], config.json requires \[7, 32\]"),
    ],
)
def test_a_config_that_contradicts_its_experts_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path)
    edit_config(path, **change)
    with pytest.raises(CheckpointError, match=named):
        load(path)
