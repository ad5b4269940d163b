"""Values that a person puts in the place of those in a checkpoint's `config.json` (`hf_overrides`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.text_config import OF_THE_WHOLE, TEXT_CONFIG
from octavo.errors import ConfigError

_ROPES: Final = "rope_parameters"
_SCALING: Final = "rope_scaling"
_THETA: Final = "rope_theta"


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with these values; those of an object replace only what they name. Raises ConfigError for
    values that would have no effect, and for a `quantization_config`."""
    if "quantization_config" in overrides:
        raise ConfigError(
            "hf_overrides has quantization_config, which says how the stored weights are read: leave it out"
        )
    text = config.get(TEXT_CONFIG)
    inner = text if isinstance(text, Mapping) else {}
    for name in overrides:
        has_own = inner.get(_ROPES if name in (_SCALING, _THETA) and _ROPES in inner else name) is not None
        if has_own and name not in OF_THE_WHOLE:
            raise ConfigError(
                f'hf_overrides has {name}, but the {TEXT_CONFIG} of this model has its own: give {{"{TEXT_CONFIG}": '
                f'{{"{name}": ...}}}}'
            )
    return _merged(config, overrides)


def flat_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides by the names that their values have in the config of the text model."""
    inner, text = overrides.get(TEXT_CONFIG), config.get(TEXT_CONFIG)
    own = _with_ropes_in_place(text, inner) if isinstance(inner, Mapping) and isinstance(text, Mapping) else {}
    return {**_with_ropes_in_place(config, overrides), **own}


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name, value in _with_ropes_in_place(config, overrides).items():
        own = config.get(name)
        found[name] = _merged(own, value) if isinstance(own, Mapping) and isinstance(value, Mapping) else value
    return found


def _with_ropes_in_place(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides with `rope_scaling` and `rope_theta` within `rope_parameters`, where a config has that: it
    counts alone."""
    given, ropes = dict(overrides), config.get(_ROPES)
    older = [name for name in (_SCALING, _THETA) if name in given]
    if not isinstance(ropes, Mapping) or not older:
        return given
    if any(isinstance(each, Mapping) for each in ropes.values()):
        raise ConfigError(
            f"hf_overrides has {older[0]}, but the {_ROPES} of this model differ by kind of layer: give {_ROPES} with "
            f"{' or '.join(ropes)}"
        )
    scaling = given.pop(_SCALING, None)
    values = dict(scaling) if isinstance(scaling, Mapping) else {}
    if "type" in values:
        values.setdefault("rope_type", values.pop("type"))
    if _THETA in given:
        values[_THETA] = given.pop(_THETA)
    return {**given, _ROPES: {**values, **given.get(_ROPES, {})}}
