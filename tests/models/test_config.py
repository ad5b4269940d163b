"""What a config leaves out is what transformers takes in its place, or is asked for by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.errors import CheckpointError
from octavo.models.config import DecoderConfig
from octavo.models.registry import resolve_model
from tests.fakes.checkpoints import family_config
from tests.fakes.families import FAMILIES

NOT_A_DEFAULT = {"architectures", "model_type", "per_layer_config", "num_key_value_heads", "num_hidden_layers"}
"""Keys that say which model it is, or that tensors of other shapes belong to."""
OTHER_CLASS = {"minicpm"}
"""Families whose fake has the keys of another one beside its own."""


def stated(family: str, **own: Any) -> dict[str, Any]:
    """Return the config of a small model with all its keys; those of `own` have other values."""
    return {**json.loads(family_config(family).to_json_string(use_diff=False)), **own}


def numbers(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return what no shape of a tensor tells of a model; None for a config that is refused by name."""
    try:
        checkpoint = Checkpoint(Path(__file__).parent, config)
        found: DecoderConfig = resolve_model(checkpoint).read(checkpoint)
    except CheckpointError:
        return None
    ropes = found.ropes or (found.rope,) * found.num_layers
    return {
        "ropes": [None if rope is None else (rope.theta, rope.scaling, rope.interleaved) for rope in ropes],
        "windows": found.windows or (None,) * found.num_layers,
        "rule": None if found.mixture is None else found.mixture.rule,
        **{
            name: getattr(found, name)
            for name in ("norm_eps", "tied", "attention_scale", "embedding_multiplier", "logit_multiplier")
        },
    }


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - OTHER_CLASS))
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(family: str) -> None:
    whole = stated(family)
    expected = numbers(whole)
    assert expected is not None
    for key in whole.keys() - FAMILIES[family][2].keys() - NOT_A_DEFAULT:
        left_out = {name: value for name, value in whole.items() if name != key}
        assert numbers(left_out) in (None, expected), key


@pytest.mark.parametrize(("family", "key"), [("ernie4_5_moe", "moe_k"), ("hunyuan_v1_moe", "moe_topk")])
def test_the_number_of_chosen_experts_has_two_names(family: str, key: str) -> None:
    config = stated(family)
    assert numbers({**config, key: None, "num_experts_per_tok": config[key]}) == numbers(config)


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("ernie4_5_moe", {"moe_norm_min": 0.1}),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 6}),
        ("gemma3n", {"altup_active_idx": 4}),
        ("gemma3n", {"altup_num_inputs": 1}),
        ("gemma3n", {"hidden_size_per_layer_input": 0}),
        ("gemma3n", {"intermediate_size": [56] * 5}),
        ("gemma3n", {"num_kv_shared_layers": 5}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 0}}),
        ("llama", {"clip_qkv": 8.0, "architectures": ["IQuestCoderForCausalLM"]}),
        ("llama", {"use_sliding_window": True, "architectures": ["IQuestCoderForCausalLM"]}),
        ("jamba", {"expert_layer_offset": 2}),
        ("jamba", {"mamba_inner_layernorms": False}),
        ("mamba", {"time_step_rank": 0}),
        ("mamba2", {"num_heads": 6}),
        ("mamba2", {"n_groups": 3}),
        ("minimax_m2", {"rope_parameters": {"full_attention": {"rope_theta": 3e3}, "rope_theta": 5e6}}),
        ("mistral4", {"qk_nope_head_dim": 13}),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(family: str, own: dict[str, Any]) -> None:
    checkpoint = Checkpoint(Path(__file__).parent, stated(family, **own))
    with pytest.raises(CheckpointError, match=next(iter(own))):
        resolve_model(checkpoint).read(checkpoint)
