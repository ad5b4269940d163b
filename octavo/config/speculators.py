"""Checkpoints of the `speculators` library: a model that guesses, whose config names the model that verifies.

The config of its layers is in `transformer_layer_config`; what is beside it says how it guesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from octavo.config.args import EngineArgs
from octavo.config.section import Section
from octavo.errors import ConfigError, UnsupportedModel

_LAYERS: Final = "transformer_layer_config"
_SPECULATORS: Final = "speculators_config"
_METHODS: Final = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""By `speculators_model_type`: the method of `speculative_config`."""


def of_layers(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config of such a checkpoint with the keys of its layers on the first level; others as they are.

    Raises CheckpointError where these are no object.
    """
    layers = Section(config, where).section(_LAYERS) if _SPECULATORS in config else None
    if layers is None:
        return dict(config)
    own = {name: value for name, value in config.items() if value is not None and name != _LAYERS}
    # a default of the library, which other heads do not share
    is_normed = config.get("speculators_model_type") == "eagle3"
    return {"norm_before_residual": is_normed, **layers.values, **own, "model_type": layers.values.get("model_type")}


def with_verifier(args: EngineArgs, c: Section, path: Path) -> EngineArgs:
    """Return the arguments with which the model that a speculator names is served beside it; `args` for other models.

    c: the config of `args.model`, which is at `path`. What `speculative_config` says counts, but for method and model.
    Raises CheckpointError, UnsupportedModel for a method that there is not, and ConfigError for two models that guess.
    """
    config = c.section(_SPECULATORS)
    if config is None:
        return args
    given: Mapping[str, Any] = args.speculative_config or {}
    if "model" in given:
        raise ConfigError(
            f"speculative_config: model is {given['model']}, but model is {args.model}, a draft "
            "model or head whose config.json names its target model; leave one of them out"
        )
    method = c.str("speculators_model_type")
    if method not in _METHODS:
        raise UnsupportedModel(
            f"{c.origin('speculators_model_type')}: speculators_model_type is {method}, expected "
            f"{' or '.join(_METHODS)}; name the model that it guesses for, and take another speculative_config"
        )
    methods, verifier = config.values.get("proposal_methods"), config.section("verifier")
    if verifier is None:
        raise config.error("verifier", "an object that names the model")
    own: dict[str, Any] = {}
    if isinstance(methods, list) and methods and isinstance(methods[0], dict):
        own["num_speculative_tokens"] = Section(methods[0], config.where).positive("speculative_tokens", 16)
    speculative = own | dict(given) | {"method": _METHODS[method], "model": str(path)}
    return dataclasses.replace(
        args,
        model=verifier.str("name_or_path"),
        revision=None,
        served_model_name=args.served_model_name or (args.model,),
        speculative_config=speculative,
    )
