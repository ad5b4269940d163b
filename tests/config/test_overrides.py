"""Values in the place of those of config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import model_facts
from octavo.config.overrides import overridden
from octavo.config.resolve import resolve
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.models.registry import resolve_model
from octavo.platform import Platform
from octavo.worker.start.identity import model_digest
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gguf_files import convert

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}, "e": 5}, {"a": 1, "b": {"c": 4, "d": 3}, "e": 5}),
        ({"rope_scaling": None}, {"rope_scaling": {"factor": 2}}, {"rope_scaling": {"factor": 2}}),
        ({"rope_scaling": {"factor": 2}}, {"rope_scaling": None}, {"rope_scaling": None}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 5e5},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"text_config": {"rope_theta": 1e4, "x": 1}, "architectures": ["A"]},
            {"text_config": {"rope_theta": 2e4}, "architectures": ["B"]},
            {"text_config": {"rope_theta": 2e4, "x": 1}, "architectures": ["B"]},
        ),
    ],
)
def test_values_replace_what_they_name(
    config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps(config)
    assert overridden(config, overrides) == expected
    assert json.dumps(config) == before


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ({}, {"quantization_config": {}}, "quantization_config"),
        ({"text_config": {"hidden_size": 8}}, {"hidden_size": 9}, "text_config"),
        ({"text_config": {"rope_parameters": {"rope_theta": 1.0}}}, {"rope_scaling": YARN}, "text_config"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, {"rope_theta": 2.0}, "by kind of layer"),
    ],
)
def test_values_without_effect_are_refused(config: dict[str, Any], overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        overridden(config, overrides)


@pytest.mark.parametrize(
    ("text", "overrides", "name"),
    [
        ({}, {"a": "x"}, "a"),
        ({}, {"text_config": {"a": "x"}}, "a"),
        ({"b": {"a": 1}}, {"b": {"a": "x"}}, "b.a"),
        ({"rope_parameters": {}}, {"rope_theta": "x"}, "rope_parameters.rope_theta"),
        ({}, {"b": {"a": 1}}, "c"),
        ({"b": {"a": "x"}}, {"b": {"d": 1}}, "b.a"),
    ],
)
def test_errors_name_the_overrides_where_the_wrong_value_is_theirs(
    text: dict[str, Any], overrides: dict[str, Any], name: str, tmp_path: Path
) -> None:
    within = {"text_config": text} if "text_config" in overrides else text
    checkpoint = Checkpoint(tmp_path, {**within, "c": "x"}, overrides)
    *outer, last = name.split(".")
    section = checkpoint.section(outer[0]) if outer else checkpoint
    assert section is not None
    is_theirs = name != "c" and overrides != {"b": {"d": 1}}
    source = rf"--hf-overrides \(over {tmp_path}/config.json\)" if is_theirs else f"{tmp_path}/config.json"
    with pytest.raises(CheckpointError, match=rf'^{source}: (text_config\.)?{name} is "x", expected an integer'):
        section.int(last)
    with pytest.raises(UnsupportedModel, match=f"^{source}: "):
        section.expect(last, 1)
    with pytest.raises(UnsupportedModel, match=f"^{source}: "):
        section.refuse(last, because="it is not supported")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rope_scaling": {"rope_type": "none"}}, 'rope_type is "none"'),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_parameters.factor is -1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, "rope_parameters differ by kind of layer"),
        ({"head_dim": 3}, "head_dim is 3, and 3 elements of a head turn"),
        ({"layer_types": ["none"]}, r'layer_types has \["none"\]'),
        ({"architectures": ["None"]}, "there is no model family"),
    ],
)
def test_a_model_that_the_overrides_describe_wrongly_is_refused_with_their_name(
    overrides: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path)
    checkpoint = Checkpoint.open(path, overrides)
    with pytest.raises(CheckpointError, match=rf"^--hf-overrides \(over {path}/config.json\): {said}"):
        resolve_model(checkpoint).read(checkpoint)
    encoder = Checkpoint(path, {"vision_config": {"a": 1}}, {"vision_config": {"a": "x"}}).stored.section(
        "vision_config"
    )
    assert encoder is not None
    with pytest.raises(CheckpointError, match="^--hf-overrides .*: vision_config.a is"):
        encoder.int("a")


def test_a_longer_context_and_another_digest_follow(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    assert Checkpoint.open(path).max_model_len() == 256
    assert Checkpoint.open(path, {"rope_scaling": YARN}).max_model_len() == 1024
    config = resolve(
        EngineArgs(model=str(path), hf_overrides={"rope_theta": 1.0}), Checkpoint.open(path), Platform.detect()
    )
    assert dict(model_facts(config, Checkpoint.open(path)))["overrides"] == '{"rope_theta": 1.0}'
    file = convert(path, "llama")
    assert Checkpoint.open(file, {"max_position_embeddings": 512}).max_model_len() == 512
    given = (None, {}, {"rope_theta": 1.0}, {"rope_scaling": YARN})
    assert len({model_digest(Checkpoint.open(path, each)) for each in given}) == 3


def resolved(path: Path, **arguments: Any) -> Any:
    return resolve(EngineArgs(model=str(path), **arguments), Checkpoint.open(path), Platform.detect()).model


@pytest.mark.parametrize("source", ["auto", "none"])
def test_sampling_defaults_are_overridden(source: str, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    (path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": 3}')
    overrides = {"temperature": 0.25, "max_new_tokens": 9, "eos_token_id": [4, 5]}
    model = resolved(path, generation_config=source, override_generation_config=overrides)
    own = {"top_k": 7} if source == "auto" else {}
    assert model.generation_defaults == {"temperature": 0.25, "max_tokens": 9, **own}
    assert model.eos_token_ids == (4, 5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"top_p": 2}, "override_generation_config: top_p"),
        ({"eos_token_id": "x"}, "override_generation_config: eos_token_id"),
    ],
)
def test_sampling_defaults_that_make_no_sense_are_refused(overrides: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(make_checkpoint("llama", tmp_path), override_generation_config=overrides)
