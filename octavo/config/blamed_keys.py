"""Which values of a config a library refuses, whose own errors often do not say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from octavo.config.section import shown

_MOST: Final = 3
"""More keys would not help to find the wrong one."""
_SECONDS: Final = 10.0
"""The time after which no further key is tried: large models take long to be made."""
_UNUSUAL: Final = 1 << 24
_WORD: Final = 4
"""A value of this many characters or more does not occur in an error by chance."""
_PARTS: Final = ("_config", "rope_parameters", "rope_scaling", "size")


def blamed_keys(error: Exception, values: Mapping[str, Any], make: Callable[[dict[str, Any]], object]) -> str:
    """Return 'a.b is 3 or c is "x"': the keys without any one of which `make` raises nothing; "" where there is none.

    make: is given `values`, with which it raises `error`, without one key each time. Keys and values that the error
    has in its text, and unusual values, come first; none is tried after 10 s.
    """
    deadline, said = time.monotonic() + _SECONDS, str(error)

    def is_unlikely(found: tuple[tuple[str, ...], Any]) -> tuple[bool, bool]:
        (*_, key), value = found
        is_unusual = not isinstance(value, bool | int | float) or not 0 < value < _UNUSUAL
        is_said = key in said or (len(str(value)) >= _WORD and str(value) in said)
        return not is_said, not is_unusual

    blamed = (
        f"{'.'.join(path)} is {shown(value)}"
        for path, value in sorted(_paths(values), key=is_unlikely)
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
    """Yield keys behind those of the parts of the config that they are in, with values that are no parts."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value and key.endswith(_PARTS):
            yield from _paths(value, (*path, key))
        else:
            yield (*path, key), value


def _without(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    key, *rest = path
    changed = dict(values)
    if rest:
        changed[key] = _without(values[key], tuple(rest))
    else:
        changed.pop(key, None)  # some classes take keys out of what they are given
    return changed
