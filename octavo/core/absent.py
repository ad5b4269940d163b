"""Options of vLLM that octavo does not have, and its message for each.

One table, `absent.json`, for flags, keywords, YAML keys, variables, sampling parameters and the reference page:

not_yet: what is not there yet, with its verb, and the options that belong to it. renamed: options that octavo has under
another name. without: options that octavo does without, by the reason. values: values of octavo's options, by what is
said to them. python: names of modules and methods that programs use, by what is said to them. paths: endpoints of other
servers, by what is said to their clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from octavo.errors import suggestion

T = TypeVar("T")


@cache
def _table() -> dict[str, dict[str, str]]:
    text = (files("octavo") / "core" / "absent.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, dict[str, str]])


@cache
def absent_options() -> Mapping[str, str]:
    """Return the message for each option, by its name with underscores, in the order of the names."""
    said = {name: f"{feature} not there yet" for feature, name in _each(_table()["not_yet"])}
    said |= {name: reason for reason, name in _each(_table()["without"])}
    said |= {name: f"octavo calls it {ours}" for name, ours in _table()["renamed"].items()}
    return MappingProxyType(dict(sorted(said.items())))


def renamed_options() -> Mapping[str, str]:
    """Return octavo's names of options, by the names that others have for them."""
    return MappingProxyType(_table()["renamed"])


def remark(name: str, known: Iterable[str]) -> str:
    """Return what follows "NAME is not an argument": why there is none, or the nearest `known` name, or nothing."""
    said = absent_options().get(name.lower().removeprefix("octavo_"))
    return f": {said}" if said is not None else suggestion(name, known)


def value_remark(name: str, value: str) -> str | None:
    """Return the message for a value that other servers have for this option; None for any other value."""
    said = {pair: reason for reason, pair in _each(_table()["values"])}
    return said.get(f"{name}={value.lower()}")


@cache
def absent_names() -> Mapping[str, str]:
    """Return the messages for names that programs for vLLM import or call."""
    return MappingProxyType({name: said for said, name in _each(_table()["python"])})


@cache
def absent_paths() -> Mapping[str, str]:
    """Return the messages for clients that ask for endpoints of other servers, by path."""
    return MappingProxyType({path: said for said, path in _each(_table()["paths"])})


def says_what_it_lacks(cls: type[T]) -> type[T]:
    """Let the AttributeError of a class say why it lacks a method that programs for vLLM call."""

    def __getattr__(self: T, name: str) -> Any:  # noqa: N807
        said = absent_names().get(name)
        because = "" if said is None else f": {said}"
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{because}", name=name, obj=self)

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
    return cls


def _each(names_by_reason: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason, names in names_by_reason.items():
        for name in names.split():
            yield reason, name
