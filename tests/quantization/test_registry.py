"""Weight formats by name."""

from __future__ import annotations

import pytest

from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.errors import ConfigError
from octavo.quantization.registry import method_named


def test_every_choice_of_the_argument_has_its_method() -> None:
    choices = arguments(EngineArgs)["quantization"].arg.choices
    assert choices is not None
    assert [method_named(name).name for name in choices] == list(choices)


def test_without_a_name_weights_stay_as_they_are() -> None:
    assert method_named(None).name == "unquantized"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="quantization is int5, must be one of int8, int4, int4-g128"):
        method_named("int5")
