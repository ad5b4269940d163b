"""Architecture names lead to model files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.errors import UnsupportedModel
from octavo.models.registry import ModelClass, known_architectures, resolve_model
from tests.fakes.checkpoints import FAMILIES


def named(path: Path, architecture: str) -> Checkpoint:
    (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return Checkpoint.open(path)


def test_every_family_is_known() -> None:
    assert {model for _, model, _ in FAMILIES.values()} <= set(known_architectures())


def architectures_of(model: ModelClass) -> tuple[str, ...]:
    found: tuple[str, ...] = sys.modules[model.__module__].ARCHITECTURES
    return found


@pytest.mark.parametrize("architecture", known_architectures())
def test_a_known_architecture_leads_to_the_file_that_states_it(architecture: str, tmp_path: Path) -> None:
    assert architecture in architectures_of(resolve_model(named(tmp_path, architecture)))


@pytest.mark.parametrize("architecture", known_architectures())
@pytest.mark.parametrize("absent", [{}, {"architectures": None}])
def test_without_an_architecture_the_type_of_model_leads_there(
    architecture: str, absent: dict[str, Any], tmp_path: Path
) -> None:
    model_type = resolve_model(named(tmp_path, architecture)).__module__.rpartition(".")[2]
    (tmp_path / "config.json").write_text(json.dumps({**absent, "model_type": model_type}))
    assert architecture in architectures_of(resolve_model(Checkpoint.open(tmp_path)))


@pytest.mark.parametrize(
    ("model_type", "file"),
    [
        *(("cohere2", "cohere"), ("gemma3_text", "gemma3"), ("glm4", "glm"), ("kimi_k2", "deepseek_v3")),
        *(("lfm2_moe", "lfm2"), ("ministral", "mistral"), ("olmo3", "olmo2"), ("qwen3_5_moe_text", "qwen3_5")),
    ],
)
def test_a_type_of_model_of_another_name_leads_to_the_file_of_its_family(
    model_type: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert resolve_model(Checkpoint.open(tmp_path)).__module__ == f"octavo.models.{file}"


def test_only_architectures_are_listed_as_such() -> None:
    assert [name for name in known_architectures() if name[0].islower()] == []


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("BloomForCausalLM", "Bloom"), ("Qwen9VLForConditionalGeneration", "Qwen9VL"), ("lama", "lama")],
)
def test_a_family_that_is_not_there_is_named_with_those_that_are(
    architecture: str, family: str, tmp_path: Path
) -> None:
    known = ".*Cohere2, .*GPT2, .*Llama, .*Qwen3"
    with pytest.raises(UnsupportedModel, match=rf"no model family {family} yet \(.*{architecture}\).* there: {known}"):
        resolve_model(named(tmp_path, architecture))
