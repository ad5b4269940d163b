"""One implementation per operator, chosen once and with a reason."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.ops.norm import rms_norm
from octavo.ops.registry import Availability, Choice, Implementation, bind, operators
from octavo.platform import Platform

PLATFORM = Platform.detect()


def fast(*_: object) -> str:
    return "fast"


def faster(*_: object) -> str:
    return "faster"


def candidate(name: str, function: object, rank: int, usable: bool, because: str) -> Implementation:
    return Implementation("rms_norm", name, lambda _: function, lambda _: Availability(usable, because), rank)  # type: ignore[arg-type,return-value]


def choice_of(ops: object, operator: str) -> Choice:
    return next(choice for choice in ops.choices if choice.operator == operator)  # type: ignore[attr-defined]


def test_without_kernels_the_reference_is_bound() -> None:
    ops = bind(PLATFORM, candidates=())
    assert ops.rms_norm is rms_norm
    assert choice_of(ops, "rms_norm") == Choice("rms_norm", "reference", "the only implementation")


def test_the_best_usable_implementation_is_taken_and_says_why() -> None:
    candidates = [
        candidate("plain", fast, 1, True, "always"),
        candidate("avx2", faster, 2, True, "the processor has AVX2"),
        candidate("amx", fast, 3, False, "no AMX"),
    ]
    ops = bind(PLATFORM, candidates=candidates)
    assert ops.rms_norm is faster
    assert choice_of(ops, "rms_norm") == Choice("rms_norm", "avx2", "the processor has AVX2")
    assert choice_of(ops, "embedding").implementation == "reference"


def test_the_reference_says_why_nothing_better_is_there() -> None:
    ops = bind(PLATFORM, candidates=[candidate("amx", fast, 3, False, "no AMX")])
    assert choice_of(ops, "rms_norm") == Choice("rms_norm", "reference", "amx: no AMX")


@pytest.mark.parametrize("wanted", ["reference", "plain"])
def test_an_override_wins_over_rank(wanted: str) -> None:
    candidates = [candidate("plain", fast, 1, True, ""), candidate("avx2", faster, 2, True, "")]
    ops = bind(PLATFORM, {"rms_norm": wanted}, candidates)
    assert ops.rms_norm is {"reference": rms_norm, "plain": fast}[wanted]
    assert choice_of(ops, "rms_norm").because == "override"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_nrom": "reference"}, "no such operator; did you mean rms_norm"),
        ({"rms_norm": "avx9"}, "no such implementation; there are: reference, amx"),
        ({"rms_norm": "amx"}, "cannot run here: no AMX"),
    ],
)
def test_an_override_that_cannot_be_met_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind(PLATFORM, overrides, [candidate("amx", fast, 3, False, "no AMX")])


def test_an_unknown_operator_is_an_attribute_error_with_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match="did you mean rms_norm"):
        _ = bind(PLATFORM, candidates=()).rms_nrm


def test_every_operator_has_a_name_of_its_own_and_a_documented_reference() -> None:
    for name, operator in operators().items():
        assert operator.name == name
        assert operator.reference.__doc__
