"""Configs of text models within models that read images or sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.config.text_config import flattened
from octavo.errors import CheckpointError
from tests.fakes.checkpoints import family_config
from tests.fakes.families import FAMILIES


def checkpoint(text: Any, **outer: Any) -> Checkpoint:
    return Checkpoint(Path("model"), {"architectures": ["OuterModel"], **outer, "text_config": text})


def test_keys_of_the_text_model_are_read_as_if_they_stood_beside_the_others() -> None:
    c = checkpoint(
        {"hidden_size": 64, "max_position_embeddings": 100, "dtype": "float32"}, hidden_size=7, dtype="float16"
    )
    assert c.positive("hidden_size") == 64
    assert c.max_model_len() == 100
    assert c.dtype_name() == "float16"
    assert c.architecture == "OuterModel"


def test_the_whole_model_says_what_ends_a_text_unless_only_the_text_model_does() -> None:
    assert checkpoint({"eos_token_id": 1}, eos_token_id=[5, 6]).eos_token_ids() == (5, 6)
    assert checkpoint({"eos_token_id": 1}, eos_token_id=None).eos_token_ids() == (1,)


def test_a_complaint_says_where_the_key_is() -> None:
    c = checkpoint({"hidden_size": "x", "rope_scaling": {"factor": []}}, vocab_size=[])
    with pytest.raises(CheckpointError, match=r"text_config\.hidden_size is \"x\", expected an integer"):
        c.positive("hidden_size")
    with pytest.raises(CheckpointError, match=r": vocab_size is \[\], expected an integer"):
        c.positive("vocab_size")
    with pytest.raises(CheckpointError, match=r"text_config\.rope_scaling\.factor is \[\], expected a number"):
        (c.section("rope_scaling") or c).float("factor")


def test_a_text_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"text_config is 3, expected an object"):
        checkpoint(3)


def test_positions_of_text_are_the_same_in_all_sections() -> None:
    for name in ("type", "rope_type"):
        c = checkpoint({"rope_scaling": {name: "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 7.0})
        assert c.rope().str("rope_type") == "default"
        assert c.rope().float("rope_theta") == 7.0


def test_rotations_that_a_config_leaves_out_are_those_of_the_release() -> None:
    """gpt-oss and Ministral 3 state theirs with the context that they stretch."""
    num_compared = 0
    for family in FAMILIES:
        config = type(family_config(family))()
        thetas = config.to_dict().get("rope_parameters") or {}
        if "rope_theta" in thetas and thetas["rope_type"] == "default":
            c = Checkpoint(Path("model"), {"architectures": ["Model"], "model_type": config.model_type})
            assert c.rope().float("rope_theta") == thetas["rope_theta"], family
            num_compared += 1
    assert num_compared > len(FAMILIES) / 2


def test_values_that_published_configs_of_gemma_3_leave_out() -> None:
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "head_dim": 128}
    c = checkpoint(text)
    assert (c.positive("num_attention_heads"), c.positive("head_dim"), c.max_model_len()) == (8, 128, 131_072)
    full, local = c.rope("full_attention"), c.rope("sliding_attention")
    assert (full.str("rope_type"), full.float("factor"), full.float("rope_theta")) == ("linear", 8.0, 1e6)
    assert (local.str("rope_type"), local.float("rope_theta")) == ("default", 1e4)


@pytest.mark.parametrize("around", ["GlmAsr", "Voxtral"])
def test_values_that_configs_around_a_text_model_leave_out(around: str) -> None:
    import transformers

    whole = getattr(transformers, f"{around}Config")()
    text = whole.text_config.to_dict()
    text["tie_word_embeddings"] |= getattr(whole, "tie_word_embeddings", False)
    config = {"model_type": whole.model_type, "text_config": {"model_type": text["model_type"]}}
    found = flattened(config, "config.json")
    assert found["hidden_size"] == text["hidden_size"]
    for name in found.keys() - config.keys():
        assert found[name] == (text["rope_parameters"] if name == "rope_theta" else text)[name], name


@pytest.mark.parametrize("around", ["Cohere2Vision", "GlmAsr", "GraniteSpeech", "Lfm2Vl", "Qwen3ASR"])
def test_heads_are_embeddings_where_the_whole_config_says_nothing_else(around: str) -> None:
    import transformers

    whole = getattr(transformers, f"{around}Config")()
    text = {"model_type": whole.text_config.model_type, "tie_word_embeddings": False}
    config = {"model_type": whole.model_type, "text_config": text}
    assert flattened(config, "config.json")["tie_word_embeddings"] is whole.tie_word_embeddings is True
    assert not flattened({**config, "tie_word_embeddings": False}, "config.json")["tie_word_embeddings"]


def test_a_config_without_a_text_model_stays_as_it_is() -> None:
    config = {"hidden_size": 8, "rope_parameters": {"rope_type": "default"}}
    assert flattened(config, "config.json") == config
