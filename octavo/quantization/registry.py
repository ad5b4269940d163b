"""The weight formats by the names that people give them."""

from __future__ import annotations

from octavo.errors import ConfigError, suggestion
from octavo.quantization import int4, int8
from octavo.quantization.method import Unquantized, WeightMethod


def method_named(name: str | None) -> WeightMethod:
    """The method of `--quantization`; without a name weights stay as they are. Raises ConfigError."""
    methods: dict[str, WeightMethod] = {each.name: each for each in (*int8.METHODS, *int4.METHODS)}
    if name is None:
        return Unquantized()
    if name not in methods:
        known = ", ".join(methods)
        raise ConfigError(f"quantization is {name}, must be one of {known}{suggestion(name, methods)}")
    return methods[name]
