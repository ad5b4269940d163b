"""Architecture names lead to model files."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.models.registry import known_architectures, resolve_model
from tests.fakes.checkpoints import family_config
from tests.fakes.families import FAMILIES, OTHER_ARCHITECTURES
from tests.fakes.vision import make_vision_checkpoint
from tests.models.loading import read_config


def named(path: Path, architecture: str) -> Checkpoint:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return Checkpoint.open(path)


def test_every_family_is_known() -> None:
    found = {OTHER_ARCHITECTURES.get(family, model) for family, (_, model, _) in FAMILIES.items()}
    assert found <= set(known_architectures())


def test_a_known_architecture_leads_to_the_class_of_its_name(tmp_path: Path) -> None:
    for architecture in known_architectures():
        model = resolve_model(named(tmp_path, architecture), reads_images=False)
        assert model is getattr(sys.modules[model.__module__], architecture)


@pytest.mark.parametrize("absent", [{}, {"architectures": None}])
def test_without_an_architecture_the_type_of_model_leads_there(absent: dict[str, Any], tmp_path: Path) -> None:
    for family in FAMILIES:
        config = family_config(family)
        stated = {"model_type": config.model_type, "rope_theta": 1e4}
        (tmp_path / "config.json").write_text(json.dumps({**absent, **stated}))
        with_type = resolve_model(Checkpoint.open(tmp_path))
        assert with_type is resolve_model(named(tmp_path, config.architectures[0])), family


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("kimi_k2", "KimiK2ForCausalLM"),
        ("ministral", "MinistralForCausalLM"),
        ("qwen2_5_vl_text", "Qwen2ForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        ("qwen3_vl_moe", "Qwen3MoeForCausalLM"),
    ],
)
def test_a_type_of_another_name_leads_to_its_family(model_type: str, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert resolve_model(Checkpoint.open(tmp_path)) is resolve_model(named(tmp_path, architecture))


@pytest.mark.parametrize("family", ["paddleocr_vl", "qwen2_5_vl", "qwen2_vl"])
def test_keys_of_a_text_model_may_stand_beside_those_of_its_encoder(family: str, tmp_path: Path) -> None:
    nested = make_vision_checkpoint(family, tmp_path)
    found = read_config(nested)
    stored = json.loads((nested / "config.json").read_text())
    text = {name: value for name, value in stored.pop("text_config").items() if name != "model_type"}
    (nested / "config.json").write_text(json.dumps({**text, **stored}))
    beside = read_config(nested)
    assert replace(beside, library=None) == replace(found, library=None)
    assert beside.library.vision_config.to_dict() == found.library.vision_config.to_dict()


def test_a_name_that_cannot_be_encoded_is_refused_in_words_that_can(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no model family \\ud800x yet") as raised:
        resolve_model(named(tmp_path, "\ud800x"))
    assert str(raised.value).encode()


def test_only_architectures_are_listed_as_such() -> None:
    assert [name for name in known_architectures() if name[0].islower()] == []


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("XGLMForCausalLM", "XGLM"), ("Qwen9VLForConditionalGeneration", "Qwen9VL"), ("lama", "lama")],
)
def test_a_family_that_is_absent_is_named_with_what_lists_all(architecture: str, family: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"no model family {family} yet \(.*{architecture}\); octavo models lists"
    ):
        resolve_model(named(tmp_path, architecture))


def test_the_type_of_a_text_model_that_is_absent_is_named(tmp_path: Path) -> None:
    config = {"architectures": ["Kimi_K25ForConditionalGeneration"], "text_config": {"model_type": "kimi_k9"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"Kimi_K25ForCond\w+ with text_config.model_type .kimi_k9.\); octavo"):
        resolve_model(Checkpoint.open(tmp_path))


def test_a_name_of_an_architecture_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [{"a": 1}]}))
    with pytest.raises(CheckpointError, match=r"architectures is \[{.*}\], expected a list with the name"):
        _ = Checkpoint.open(tmp_path).architecture
