"""What no model can be built of is refused by name when it is opened, whatever the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.models.loader import LoadedModel
from octavo.ops.registry import bind
from tests.fakes.checkpoints import edit_config, edit_tensors, family_config, make_checkpoint
from tests.fakes.families import FAMILIES

BAD: dict[str, list[Any]] = {
    "num_attention_heads": [0, "4", 10**7],
    "num_key_value_heads": [-1],
    "head_dim": [7],
    "v_head_dim": [10**7],
    "hidden_size": [0, "big"],
    "num_hidden_layers": [0, 1.5, 1100],
    "num_layers": [0, 1100],
    "vocab_size": [0],
    "rms_norm_eps": [-1.0, "small", 10**400],
    "layer_norm_eps": [-1.0],
    "layer_norm_epsilon": [-1.0],
    "norm_epsilon": [-1.0],
    "norm_eps": [-1.0],
    "layer_types": [["linear_attention"] * 1100, ["hyper_attention"] * 9, "full_attention", [None], [{}], [[]] * 3],
    "mlp_layer_types": [[{}] * 3, "sparse"],
    "full_attn_idxs": [7, "all"],
    "rope_parameters": [{"rope_type": "magic"}, "yarn"],
    "hidden_act": ["xyz"],
    "activation_function": ["xyz"],
    "max_position_embeddings": [0, "x"],
    "tie_word_embeddings": ["yes"],
    "num_experts": [0, "a", 10**6],
    "n_routed_experts": [0, 10**6],
    "linear_num_value_heads": [0, 10**6],
    "mamba_expand": [0, -1],
    "mamba_dt_rank": [0, "low"],
    "time_step_rank": [-1, "low"],
    "attn_layer_offset": [-1, 99],
    "expert_layer_period": [0, "all"],
    "time_step_limit": ["x", [0.0], [1.0, float("nan")], [2.0, 1.0], 5],
    "num_experts_per_tok": [0, 99, "2"],
    "attn_layer_indices": ["all"],
    "top_k_experts": [0, 99],
    "moe_topk": [0, 9999],
    "zero_expert_num": [-1, 10**9],
    "n_group": [7],
    "kv_lora_rank": [0, "a"],
    "hc_sinkhorn_iters": [0, 1.5, 2**31 - 1],
}
ALSO_NAMED = {
    "rope_parameters": "rope_type",
    "moe_topk": "num_experts_per_tok",
    "num_local_experts": "num_experts",
    "num_experts": "num_local_experts",
}
NOT_READ = {
    ("axk1", "head_dim"),
    ("axk2", "head_dim"),
    ("bailing_hybrid", "head_dim"),
    ("dbrx", "num_key_value_heads"),  # kv_n_heads counts
    ("deepseek_v2", "head_dim"),
    ("deepseek_v2", "n_group"),  # experts have no groups there
    ("deepseek_v3", "head_dim"),
    ("deepseek_v32", "head_dim"),
    ("gemma4", "num_experts"),
    ("gemma4", "top_k_experts"),
    ("glm5_next", "head_dim"),
    ("glm_moe_dsa", "head_dim"),
    ("gpt_bigcode", "num_key_value_heads"),
    ("gpt_neox", "head_dim"),
    ("granitemoehybrid", "rope_parameters"),
    ("hy_v4", "head_dim"),
    ("kimi_linear", "head_dim"),
    ("mamba2", "time_step_rank"),
    *((each, "num_attention_heads") for each in ("falcon_mamba", "mamba", "mamba2")),
    ("longcat_flash", "head_dim"),
    ("minicpm3", "head_dim"),
    ("mistral4", "head_dim"),
    ("mistral_large4", "head_dim"),
    *((each, "head_dim") for each in ("inkling", "nemotron_h")),  # nothing turns: heads may have any size
    ("nemotron_h", "time_step_limit"),
    ("sarvam_mla", "head_dim"),
    ("youtu", "head_dim"),
}
DENSE = {("qwen3_5_moe", "num_experts"), ("qwen3_next", "num_experts")}
"""There a model without experts is one with other tensors."""

QUICK = ("gemma3", "gpt2", "llama", "qwen3_moe", "youtu")
"""One of each kind; the others, which share their parts, are run with the long tests."""


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_a_value_that_no_model_can_have_is_named(family: str) -> None:
    config = json.loads(family_config(family).to_json_string(use_diff=False))
    for field, values in BAD.items():
        for value in values if field in config and (family, field) not in NOT_READ else ():
            if value == 0 and (family, field) in DENSE:
                continue
            checkpoint = Checkpoint(Path(__file__).parent, {**config, field: value})
            with pytest.raises(CheckpointError, match=f"{field}|{ALSO_NAMED.get(field, field)}"):
                LoadedModel.open(checkpoint, Mesh.single())


def load(path: Path) -> None:
    LoadedModel.open(Checkpoint.open(path), Mesh.single()).load(bind(), ReferenceBackend())


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("bloom", {"hidden_size": 2**31 - 8}, "a tensor of the model would be larger than any memory"),
        ("ernie4_5_moe", {"moe_num_experts": 10**6}, "moe_num_experts is 1000000, expected an integer of at most 8192"),
        (
            "ernie4_5_moe",
            {"moe_num_shared_experts": -3},
            "moe_num_shared_experts is -3, expected an integer",
        ),
        (
            "ernie4_5_moe",
            {"moe_k": None, "num_experts_per_tok": 99},
            "num_experts_per_tok is 99, expected at most the experts that are chosen from",
        ),
        ("granitemoeshared", {"shared_intermediate_size": -5}, "shared_intermediate_size is -5, expected an integer"),
        ("gptj", {"rotary_dim": 100}, "rotary_dim is 100, expected at most the 8 elements of a head"),
        ("gte", {"type_vocab_size": -1}, "type_vocab_size is -1, expected an integer of at least 0"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [10**12] * 2}, "moe_intermediate_size is 1000000000000, expected"),
        ("hunyuan_v1_moe", {"moe_topk": [True] * 2}, "moe_topk is .*, expected one number above 0 for all layers"),
        (
            "deepseek_v3",
            {"n_group": None, "n_routed_experts": 6},
            "n_routed_experts is 6, expected a multiple of 8",
        ),
        (
            "ernie4_5_moe",
            {"moe_k": None, "moe_num_experts": 4},
            "moe_num_experts is 4, expected so many that 6 are chosen",
        ),
        ("hunyuan_v1_moe", {"moe_topk": 99}, "moe_topk is 99, expected at most the experts that are chosen from"),
        ("hunyuan_v1_moe", {"moe_topk": [99] * 2}, "moe_topk is 99, expected at most the experts"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e300}, "block_ffn_dim_multiplier is 1e.300, expected a factor"),
        ("mpnet", {"max_position_embeddings": 2}, "max_position_embeddings is 2, expected at least 3"),
    ],
)
def test_a_size_that_nothing_has_is_named(family: str, change: dict[str, Any], named: str) -> None:
    config = json.loads(family_config(family).to_json_string(use_diff=False))
    with pytest.raises(CheckpointError, match=named):
        LoadedModel.open(Checkpoint(Path(__file__).parent, {**config, **change}), Mesh.single())


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


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_share_of_a_head_beyond_the_whole_is_named(family: str) -> None:
    config = json.loads(family_config(family).to_json_string(use_diff=False))
    rope = {**config["rope_parameters"], "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1e308}
    checkpoint = Checkpoint(Path(__file__).parent, {**config, "rope_parameters": rope})
    with pytest.raises(CheckpointError, match="rope_parameters.partial_rotary_factor is 1e.308, expected the share"):
        LoadedModel.open(checkpoint, Mesh.single())


def test_a_long_value_is_cut_in_the_message() -> None:
    config = json.loads(family_config("llama").to_json_string(use_diff=False))
    with pytest.raises(CheckpointError, match="hidden_act") as raised:
        LoadedModel.open(Checkpoint(Path(__file__).parent, {**config, "hidden_act": ["silu"] * 9999}), Mesh.single())
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("layer", ["9" * 5000, "²", "١"])
def test_a_tensor_of_a_layer_without_a_number_is_named(layer: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    edit_tensors(path, **{f"model.layers.{layer}.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=f"layers.{layer}.mlp.up_proj.weight"):
        load(path)
