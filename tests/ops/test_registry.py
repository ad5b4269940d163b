"""One implementation per operator, chosen once and with a reason."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.ops.norm import rms_norm
from octavo.ops.registry import Choice, Implementation, bind, operators


def fast(*_: object) -> str:
    return "fast"


def faster(*_: object) -> str:
    return "faster"


def candidate(name: str, function: object, rank: int, obstacle: str | None = None) -> Implementation:
    return Implementation("rms_norm", name, lambda _: function, lambda _: obstacle, rank)  # type: ignore[arg-type,return-value]


def choice_of(ops: object, operator: str) -> Choice:
    return next(choice for choice in ops.choices if choice.operator == operator)  # type: ignore[attr-defined]


def test_without_kernels_the_reference_is_bound() -> None:
    ops = bind()
    assert ops.rms_norm is rms_norm
    assert choice_of(ops, "rms_norm") == Choice("rms_norm", "reference", "the only implementation")


def test_the_best_usable_implementation_is_taken_and_says_why() -> None:
    candidates = [
        candidate("plain", fast, 1),
        candidate("avx2", faster, 2),
        candidate("amx", fast, 3, "no AMX"),
    ]
    ops = bind(candidates, because="the processor has AVX2")
    assert ops.rms_norm is faster
    assert choice_of(ops, "rms_norm") == Choice("rms_norm", "avx2", "the processor has AVX2")
    assert choice_of(ops, "embedding").implementation == "reference"


def test_the_reference_says_why_nothing_better_is_there() -> None:
    ops = bind([candidate("amx", fast, 3, "no AMX")])
    assert choice_of(ops, "rms_norm") == Choice("rms_norm", "reference", "amx: no AMX")


def test_an_implementation_of_no_operator_is_named() -> None:
    with pytest.raises(AssertionError, match="fast implements rms_nrom, .*; did you mean rms_norm"):
        bind([Implementation("rms_nrom", "fast", lambda runtime: fast)])


@pytest.mark.parametrize("wanted", ["reference", "plain"])
def test_an_override_wins_over_rank(wanted: str) -> None:
    candidates = [candidate("plain", fast, 1), candidate("avx2", faster, 2)]
    ops = bind(candidates, {"rms_norm": wanted})
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
        bind([candidate("amx", fast, 3, "no AMX")], overrides)


def test_an_unknown_operator_is_an_attribute_error_with_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match="did you mean rms_norm"):
        _ = bind().rms_nrm


def test_every_operator_has_a_name_of_its_own_and_a_documented_reference() -> None:
    for name, operator in operators().items():
        assert operator.name == name
        assert operator.reference.__doc__
