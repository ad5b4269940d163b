"""What an operator is, what an implementation of it is, and the choice of one per operator at start.

A file of this folder states `OPERATORS`; a file of `octavo/devices/<device>/ops/` states `IMPLEMENTATIONS`. `bind()`
is the only place where they meet: no operator asks anything per call, and the reason of each choice is kept for people.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from octavo.errors import ConfigError, suggestion

REFERENCE = "reference"


def _no_obstacle(runtime: Any) -> None:
    return None


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@dataclass(frozen=True)
class Operator:
    """One operation that a device may have its own code for.

    Examples, tolerance and trial are part of the definition: tests and benchmarks of every device take them from here.
    """

    name: str
    reference: Callable[..., Any]
    """Plain torch; says what is right."""
    examples: Callable[[torch.dtype], Iterable[tuple[Any, ...]]]
    """Argument lists that an implementation must agree on with the reference."""
    tolerance: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
    )
    """Largest difference allowed between an implementation and the reference, relative to 1 + |value|."""
    trial: Callable[..., Any] = _call
    """Tries an implementation on one list of `examples`: (implementation, *arguments) → the tensors to compare."""


@dataclass(frozen=True)
class Implementation:
    """Device code for one operator. Among the usable ones the highest rank is taken; the reference has rank 0."""

    operator: str
    name: str
    make: Callable[[Any], Callable[..., Any]]
    """Returns the function, given the device's runtime: what its kernels run with."""
    obstacle: Callable[[Any], str | None] = _no_obstacle
    """Returns why it cannot run with that runtime; None where it can."""
    rank: int = 1


@dataclass(frozen=True)
class Choice:
    """What `bind()` took for one operator, and why."""

    operator: str
    implementation: str
    because: str


class Ops:
    """The bound operators as attributes: `ops.rms_norm(x, weight, eps)`. Made by `bind()`; never changes."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], choices: tuple[Choice, ...]) -> None:
        self.__dict__.update(functions)
        self.choices = choices

    def __getattr__(self, name: str) -> Any:
        known = [choice.operator for choice in self.__dict__.get("choices", ())]
        raise AttributeError(f"no operator is called {name}{suggestion(name, known)}")


def operators() -> dict[str, Operator]:
    """Return all operators of this folder by name."""
    modules = (import_module(name) for name in _files_of("octavo.ops"))
    return {operator.name: operator for module in modules for operator in getattr(module, "OPERATORS", ())}


def implementations(package: str) -> list[Implementation]:
    """Return all implementations in the files of a package, such as `octavo.devices.cpu.ops`."""
    modules = (import_module(name) for name in _files_of(package))
    return [implementation for module in modules for implementation in getattr(module, "IMPLEMENTATIONS", ())]


def bind(
    candidates: Iterable[Implementation] = (),
    overrides: Mapping[str, str] | None = None,
    *,
    runtime: Any = None,
    because: str = "",
) -> Ops:
    """Choose one implementation per operator: the best of `candidates`, else the reference.

    `overrides` maps operator to implementation name and wins over rank (`{"rms_norm": "reference"}` bisects a wrong
    result). `runtime` is what the candidates run with, `because` the reason why they can. Raises ConfigError for an
    override that names an operator or implementation that is not there, or one that cannot run.
    """
    known = operators()
    wanted = dict(overrides or {})
    for name in wanted:
        if name not in known:
            raise ConfigError(f"op override {name}={wanted[name]}: no such operator{suggestion(name, known)}")
    by_operator: dict[str, list[Implementation]] = {name: [] for name in known}
    for candidate in candidates:
        name = candidate.operator
        assert name in known, (
            f"{candidate.name} implements {name}, and no operator is called so{suggestion(name, known)}"
        )
        by_operator[candidate.operator].append(candidate)

    functions: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    for name, operator in known.items():
        function, choice = _choose(operator, by_operator[name], runtime, wanted.get(name), because)
        functions[name] = function
        choices.append(choice)
    return Ops(functions, tuple(choices))


def _choose(
    operator: Operator, candidates: list[Implementation], runtime: Any, wanted: str | None, because: str
) -> tuple[Callable[..., Any], Choice]:
    if wanted == REFERENCE:
        return operator.reference, Choice(operator.name, REFERENCE, "override")
    if wanted is not None:
        found = next((candidate for candidate in candidates if candidate.name == wanted), None)
        if found is None:
            names = ", ".join([REFERENCE, *(candidate.name for candidate in candidates)])
            raise ConfigError(f"op override {operator.name}={wanted}: no such implementation; there are: {names}")
        obstacle = found.obstacle(runtime)
        if obstacle is not None:
            raise ConfigError(f"op override {operator.name}={wanted}: cannot run here: {obstacle}")
        return found.make(runtime), Choice(operator.name, wanted, "override")
    refused = []
    for candidate in sorted(candidates, key=lambda candidate: -candidate.rank):
        obstacle = candidate.obstacle(runtime)
        if obstacle is None:
            return candidate.make(runtime), Choice(operator.name, candidate.name, because)
        refused.append(f"{candidate.name}: {obstacle}")
    return operator.reference, Choice(operator.name, REFERENCE, "; ".join(refused) or "the only implementation")


@cache
def _files_of(package: str) -> tuple[str, ...]:
    """Return the modules of a package without the private ones; none when the package does not exist."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return ()
    names = (each.name for each in pkgutil.iter_modules(spec.submodule_search_locations))
    return tuple(sorted(f"{package}.{name}" for name in names if not name.startswith("_") and name != "registry"))
