"""A speculator is served beside the model that it names, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.section import Section
from octavo.config.speculators import of_layers, with_verifier
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel

CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "someone/a-model"},
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {"hidden_size": 64, "model_type": "llama", "target_hidden_size": 32},
}


def served(config: dict[str, Any] = CONFIG, **options: Any) -> EngineArgs:
    return with_verifier(EngineArgs(model="someone/a-head", **options), Section(config, "config.json"), Path("/head"))


def test_the_model_that_it_names_is_served_under_its_own_name() -> None:
    args = served(revision="main")
    assert (args.model, args.revision, args.served_model_name) == ("someone/a-model", None, ("someone/a-head",))
    assert args.speculative_config == {"method": "eagle3", "model": "/head", "num_speculative_tokens": 3}


def test_what_a_person_says_counts_but_for_the_method() -> None:
    args = served(speculative_config={"method": "eagle", "num_speculative_tokens": 5}, served_model_name=["x"])
    assert args.speculative_config == {"method": "eagle3", "model": "/head", "num_speculative_tokens": 5}
    assert args.served_model_name == ("x",)


def test_other_models_stay_as_they_are() -> None:
    args, config = EngineArgs(model="x"), {"hidden_size": 3}
    assert with_verifier(args, Section(config, "config.json"), Path("/x")) is args
    assert of_layers(config, "config.json") == config


def test_keys_of_its_layers_are_on_the_first_level() -> None:
    flat = of_layers(CONFIG, "config.json")
    assert (flat["hidden_size"], flat["model_type"], flat["norm_before_residual"]) == (64, "llama", True)
    assert flat["target_hidden_size"] == 32


@pytest.mark.parametrize(
    ("own", "options", "error", "message"),
    [
        (
            {"speculators_model_type": "mlp"},
            {},
            UnsupportedModel,
            "speculators_model_type is mlp, expected eagle3 or peagle or dflash or dspark",
        ),
        (
            {},
            {"speculative_config": {"method": "eagle3", "model": "y"}},
            ConfigError,
            "model is y, but model is someone/",
        ),
        ({"speculators_config": {}}, {}, CheckpointError, "verifier"),
    ],
)
def test_what_cannot_be_served_is_named(
    own: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        served(CONFIG | own, **options)
