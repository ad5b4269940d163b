"""Which values of a config a library refuses, whose own errors often do not say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from octavo.config.section import shown

_MOST: Final = 3
"""More keys would not help to find the wrong one."""
_SECONDS: Final = 5.0
"""Large models take long to be made."""


def blamed_keys(values: Mapping[str, Any], make: Callable[[dict[str, Any]], object]) -> str:
    """Return 'a.b is 3 or c is "x"': the keys without any one of which `make` raises nothing; "" where there is none.

    make: is given `values`, with which it raises an error, without one key each time; none is tried after 5 s.
    """
    deadline = time.monotonic() + _SECONDS
    blamed = (
        f"{'.'.join(path)} is {shown(value)}"
        for path, value in _paths(values)
        if time.monotonic() < deadline and _succeeds(make, _without(values, path))
    )
    return " or ".join(islice(blamed, _MOST))


def _succeeds(make: Callable[[dict[str, Any]], object], values: dict[str, Any]) -> bool:
    try:
        make(values)
    except Exception:  # as with all values, so another key is at fault
        return False
    return True


def _paths(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys of values that are no objects behind those of the objects that they are in, with the values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key), value


def _without(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    key, *rest = path
    changed = dict(values)
    if rest:
        changed[key] = _without(values[key], tuple(rest))
    else:
        del changed[key]
    return changed
