"""Nemotron-NAS computes what transformers' parts of Llama compute, and what no model can have is refused by name."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import CacheGroup, KeysAndValues
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.layers.rope import Llama3Scaling
from octavo.models.deci import DeciLMForCausalLM
from octavo.simulate.model_facts import read_model_facts
from tests.fakes.checkpoints import edit_config, family_config, make_checkpoint
from tests.fakes.nemotron_nas import llama_of_blocks
from tests.fakes.sizes import BLOCKS
from tests.models.paged_run import PagedRun, load
from tests.models.test_against_transformers import LLAMA3, assert_same_as_oracle, make_streams

FAMILY = "nemotron-nas"


@pytest.mark.parametrize("overrides", [{"attention_bias": True, "mlp_bias": True}, {"rope_parameters": LLAMA3}])
def test_prompts_and_greedy_text_agree_with_layers_of_llama(overrides: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(FAMILY, tmp_path, **overrides)
    run, streams = PagedRun(load(path)), make_streams()
    run.step([(stream, len(stream.token_ids)) for stream in streams])
    run.decode(streams, 5)
    config = family_config(FAMILY, **overrides)
    config._attn_implementation = "eager"
    oracle = llama_of_blocks(config)
    oracle.load_state_dict(load_file(path / "model.safetensors"))
    for stream in streams:
        assert_same_as_oracle(oracle.eval(), stream)


def test_the_config_of_the_release_is_read(tmp_path: Path) -> None:
    """Sizes of all layers are null; widths follow from factors, and layers without attention keep nothing."""
    path = make_checkpoint(FAMILY, tmp_path)
    blocks = deepcopy(BLOCKS)
    for block in blocks:
        block["attention"] |= {"num_sink_tokens": None, "sparsify": None, "unshifted_sink": False}
    rope = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    absent = {"num_key_value_heads": None, "intermediate_size": None, "head_dim": None}
    released = {"rope_theta": 5e5, "rope_scaling": {**rope, "rope_type": "llama3"}, "block_configs": blocks}
    edit_config(path, remove=("rope_parameters",), **released, **absent)
    config = load(path).config
    assert config.rope is not None
    assert (config.rope.theta, type(config.rope.scaling)) == (5e5, Llama3Scaling)
    assert config.shape().cache_groups == (
        CacheGroup((0,), KeysAndValues(2, 8)),
        CacheGroup((2,), KeysAndValues(4, 8)),
        CacheGroup((4,), KeysAndValues(1, 8)),
    )
    assert config.intermediate_size == 256
    edit_config(path, hidden_size=8192, num_attention_heads=64, block_configs=[*blocks[1:], _block(ffn_mult=2.625)])
    assert DeciLMForCausalLM.read(Checkpoint.open(path)).intermediate_size == 14336


def _block(**ffn: Any) -> dict[str, Any]:
    return {"attention": {"n_heads_in_group": 8}, "ffn": ffn}


NONE = {"attention": {"no_op": True}, "ffn": {"no_op": True}}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"ffn": {"no_op": True}}, "an object with attention and ffn for each of 5 layers"),
        ("none", "an object with attention and ffn for each of 5 layers"),
        (NONE, "attention in some layer, and attention or an MLP in the first one"),
        ({"attention": {"n_heads_in_group": 3}, "ffn": {}}, r"block_configs\[0\]\.attention\.n_heads_in_group is 3"),
        ({"attention": {"num_key_value_heads": 3}, "ffn": {}}, r"attention\.num_key_value_heads is 3, expected a div"),
        ({"attention": {}, "ffn": {}}, r"attention\.n_heads_in_group is missing"),
        ({"attention": {"no_op": "yes"}, "ffn": {}}, r"attention\.no_op is \"yes\", expected true or false"),
        ({"attention": {"window_length": 8}, "ffn": {}}, r"attention\.window_length is 8; no release has it"),
        ({"attention": {"no_op": True}, "ffn": {"moe": {"experts": 4}}}, r"ffn\.moe is {\"experts\": 4}; no release"),
        ({"attention": {"no_op": True}, "ffn": {"ffn_mult": 1e9}}, r"ffn\.ffn_mult is 1000000000\.0, expected"),
        ({"attention": {"no_op": True}, "ffn": {"ffn_mult": 0}}, r"ffn\.ffn_mult is 0, expected a number above 0"),
        ({"attention": {"no_op": True}, "ffn": {"ffn_mult": 1e-300}}, r"ffn_mult is 1e-300, expected at least 0\.0"),
        ({"attention": {"no_op": True}, "ffn": {"hidden_act": "gelu", "ffn_mult": 1}}, r"ffn\.hidden_act is \"gelu\""),
    ],
)
def test_blocks_that_no_model_can_have_are_refused_by_name(block: Any, said: str, tmp_path: Path) -> None:
    path = make_checkpoint(FAMILY, tmp_path)
    edit_config(path, block_configs=[block, *BLOCKS[1:]])
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        load(path)


def test_a_model_without_any_attention_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(FAMILY, tmp_path)
    edit_config(path, block_configs=[{"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}] * 5)
    with pytest.raises(CheckpointError, match="expected attention in some layer"):
        load(path)


def test_its_times_are_not_simulated(tmp_path: Path) -> None:
    path = make_checkpoint(FAMILY, tmp_path)
    with pytest.raises(UnsupportedModel, match="block_configs: layers differ"):
        read_model_facts(str(path))
