"""What an operator is, what an implementation of it is, and the choice of one per operator at start.

A file of this folder states `OPERATORS`; a file of `octavo/devices/<device>/ops/` states `IMPLEMENTATIONS`. `bind()`
is the only place where they meet: no operator asks anything per call, and the reason of each choice is kept for people.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from octavo.errors import ConfigError, suggestion
from octavo.platform import Platform

REFERENCE = "reference"


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@dataclass(frozen=True)
class Operator:
    """One operation that a device may have its own code for."""

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
class Availability:
    """Whether an implementation can run here, and why."""

    usable: bool
    because: str


@dataclass(frozen=True)
class Implementation:
    """Device code for one operator. Among the usable ones the highest rank is taken; the reference has rank 0."""

    operator: str
    name: str
    make: Callable[[Any], Callable[..., Any]]
    """Answers the function, given the device's runtime: what its kernels run with (see `open_runtime`)."""
    available: Callable[[Platform], Availability]
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
    """All operators of this folder by name."""
    modules = (import_module(name) for name in _files_of("octavo.ops"))
    return {operator.name: operator for module in modules for operator in getattr(module, "OPERATORS", ())}


def implementations(device: str) -> list[Implementation]:
    """All implementations in `octavo/devices/<device>/ops/`."""
    modules = (import_module(name) for name in _files_of(f"octavo.devices.{device}.ops"))
    return [implementation for module in modules for implementation in getattr(module, "IMPLEMENTATIONS", ())]


def open_runtime(platform: Platform, threads: int = 1, instruction_set: str = "auto") -> Any:
    """What the device's kernels run with, one per worker; None where plain torch does all the work.

    Raises ConfigError for an instruction set that this machine cannot run.
    """
    if platform.is_cuda:
        return None
    runtime = import_module("octavo.devices.cpu.runtime")
    return runtime.open_runtime(platform, threads, instruction_set)


def bind(
    platform: Platform,
    overrides: Mapping[str, str] | None = None,
    candidates: Iterable[Implementation] | None = None,
    runtime: Any = None,
) -> Ops:
    """Choose one implementation per operator.

    `overrides` maps operator to implementation name and wins over rank (`{"rms_norm": "reference"}` bisects a wrong
    result). `candidates` replaces what the device's folder holds. `runtime` is that of `open_runtime`; without one only
    references are bound. Raises ConfigError for an override that names an operator or implementation that is not there,
    or one that cannot run on `platform`.
    """
    known = operators()
    wanted = dict(overrides or {})
    for name in wanted:
        if name not in known:
            raise ConfigError(f"op override {name}={wanted[name]}: no such operator{suggestion(name, known)}")
    if candidates is None:
        candidates = implementations("cuda" if platform.is_cuda else "cpu") if runtime is not None else ()
    by_operator: dict[str, list[Implementation]] = {name: [] for name in known}
    for candidate in candidates:
        by_operator[candidate.operator].append(candidate)

    functions: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    for name, operator in known.items():
        function, choice = _choose(operator, by_operator[name], platform, runtime, wanted.get(name))
        functions[name] = function
        choices.append(choice)
    return Ops(functions, tuple(choices))


def _choose(
    operator: Operator, candidates: list[Implementation], platform: Platform, runtime: Any, wanted: str | None
) -> tuple[Callable[..., Any], Choice]:
    if wanted == REFERENCE:
        return operator.reference, Choice(operator.name, REFERENCE, "override")
    if wanted is not None:
        found = next((candidate for candidate in candidates if candidate.name == wanted), None)
        if found is None:
            names = ", ".join([REFERENCE, *(candidate.name for candidate in candidates)])
            raise ConfigError(f"op override {operator.name}={wanted}: no such implementation; there are: {names}")
        state = found.available(platform)
        if not state.usable:
            raise ConfigError(f"op override {operator.name}={wanted}: cannot run here: {state.because}")
        return found.make(runtime), Choice(operator.name, wanted, "override")
    refused = []
    for candidate in sorted(candidates, key=lambda candidate: -candidate.rank):
        state = candidate.available(platform)
        if state.usable:
            return candidate.make(runtime), Choice(operator.name, candidate.name, state.because)
        refused.append(f"{candidate.name}: {state.because}")
    return operator.reference, Choice(operator.name, REFERENCE, "; ".join(refused) or "the only implementation")


def _files_of(package: str) -> list[str]:
    """Modules of a package, private ones left out; none when the package does not exist."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    found = pkgutil.iter_modules(spec.submodule_search_locations)
    return sorted(
        f"{package}.{each.name}" for each in found if not each.name.startswith("_") and each.name != "registry"
    )
