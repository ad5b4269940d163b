"""When a sequence ends because it repeats itself, in the words of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from octavo.errors import InvalidRequest

MOST_TOKENS: Final = 1024
MOST_TIMES: Final = 1024


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends a sequence whose last tokens are a pattern of min_pattern_size (0 is 1) to max_pattern_size tokens,
    min_count times. With max_pattern_size 0 there is no such end. Raises InvalidRequest."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    @classmethod
    def of(cls, value: Any, field: str = "repetition_detection") -> RepetitionDetectionParams:
        """Return the parameters that an object of a request describes."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{field} is {value!r:.60}, expected an object with {_listed()}", field=field)
        try:
            return msgspec.convert({name: each for name, each in value.items() if each is not None}, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidRequest):
                raise error.__cause__ from None
            raise InvalidRequest(f"{field}: {error}; it has {_listed()}", field=field) from None

    def __post_init__(self) -> None:
        least, most = self.min_pattern_size, self.max_pattern_size
        if not 0 <= least <= most <= MOST_TOKENS:
            raise _refused(
                f"has patterns of {least} to {most} tokens; min_pattern_size must be at least 0 and at most "
                f"max_pattern_size, and this at most {MOST_TOKENS}"
            )
        if most and not 2 <= self.min_count <= MOST_TIMES:
            raise _refused(f"has a min_count of {self.min_count}, must be from 2 to {MOST_TIMES}")


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"repetition_detection {what}", field="repetition_detection")


def _listed() -> str:
    return ", ".join(RepetitionDetectionParams.__struct_fields__)
