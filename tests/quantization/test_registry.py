"""Weight formats by name."""

from __future__ import annotations

import pytest
import torch

from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.errors import ConfigError
from octavo.ops.registry import bind
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


def test_activations_may_have_16_bits() -> None:
    x, weight = torch.randn((3, 64), generator=torch.Generator().manual_seed(1)), torch.eye(64)
    errors = [(method_named("int8", bits).format(bind())(weight)(x) - x).norm() / x.norm() for bits in (8, 16)]
    assert 1e-3 < errors[0] < 1e-2
    assert errors[1] < 1e-4
