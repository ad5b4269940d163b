"""What is said about a sampling parameter, and the check of one that is a number.

Used by sampling_params and llm.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Final

import msgspec

from octavo.errors import InvalidRequest

_MOST_BITS: Final = 64


class Param(msgspec.Struct, frozen=True):
    """Documentation and limits of one field. NaN and infinities are refused in all of them."""

    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None


def checked_number(name: str, value: Any, kind: type, limits: Param) -> Any:
    """Return `value` as a number of `kind` (int or float) within `limits`. Raises InvalidRequest."""
    if not isinstance(value, int | float) and isinstance(value, Real):  # a scalar of numpy
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is {value!r}, expected a number", field=name)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise InvalidRequest(f"{name} has {value.bit_length()} bits, must have at most {_MOST_BITS}", field=name)
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}; NaN and infinities are refused", field=name)
    if kind is int and int(value) != value:
        raise InvalidRequest(f"{name} is {value!r}, expected a whole number", field=name)
    check_limits(name, value, limits)
    return value if type(value) is kind else kind(value)


def check_limits(name: str, value: float, limits: Param) -> None:
    """Raise InvalidRequest when `value` is outside `limits`."""
    if limits.ge is not None and value < limits.ge:
        raise InvalidRequest(f"{name} is {value}, must be at least {_shown(limits.ge)}", field=name)
    if limits.gt is not None and value <= limits.gt:
        raise InvalidRequest(f"{name} is {value}, must be greater than {_shown(limits.gt)}", field=name)
    if limits.le is not None and value > limits.le:
        raise InvalidRequest(f"{name} is {value}, must be at most {_shown(limits.le)}", field=name)


def _shown(limit: float) -> str:
    """Write whole numbers in full: 2**63 - 1 is a limit that people copy."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"
