"""What a part of a run has found is kept where another piece of it fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def failure_of(error: Exception) -> str:
    """Print where an error arose, and return what a line says of it."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"[:500]


def kept(about: Mapping[str, Any], find: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the lines that `find` returns or yields, beside what they are about; where it raises, why, as `failed`."""
    try:
        for line in find():
            yield {**about, **line}
    except Exception as error:  # what comes after it is still of use
        yield {**about, "failed": failure_of(error)}
