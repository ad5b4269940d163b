"""What a caller states about a request besides its prompt and its sampling parameters: each option stands here once.

A new option is a field of `RequestOptions` and of the two sets of keywords; it reaches the scheduler with the request.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

import msgspec

from octavo.core.absent import remark
from octavo.core.adapter import LoRARequest
from octavo.core.prompt import checked_cache_salt, checked_text
from octavo.core.request_limits import check_field
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest

MAX_PRIORITY: Final = 2**63 - 1
"""Priorities go from minus this minus 1 to this."""


class RequestOptions(msgspec.Struct, kw_only=True):
    """The options of one request. Raises InvalidRequest for a wrong value.

    priority: smaller numbers go first, where the scheduling policy looks at them.
    first_token_deadline_s: seconds from the arrival until the first token is due.
    tenant: the name under which its service is counted for fair shares.
    cache_salt: only requests with the same salt share cached prefixes.
    lora_request: the adapter that it uses.
    """

    priority: int = 0
    first_token_deadline_s: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None

    def __post_init__(self) -> None:
        _check_priority(self.priority)
        _check_deadline(self.first_token_deadline_s)
        if self.tenant is not None:
            if not isinstance(self.tenant, str):
                raise InvalidRequest(f"tenant is {self.tenant!r}, must be text", field="tenant")
            check_field("tenant", self.tenant)
            checked_text(self.tenant, "tenant")
        checked_cache_salt(self.cache_salt)
        if self.lora_request is not None and not isinstance(self.lora_request, LoRARequest):
            raise InvalidRequest(
                f"lora_request is {self.lora_request!r}, expected LoRARequest(lora_name, lora_int_id, lora_path)",
                field="lora_request",
            )

    @classmethod
    def of_keywords(cls, given: Mapping[str, Any]) -> RequestOptions:
        """Return the options that a caller gives by name. Raises TypeError for another name, with what it may mean."""
        for name in given:
            if name not in cls.__struct_fields__:
                is_sampling = name in SamplingParams.__struct_fields__
                said = f": give SamplingParams({name}=…)" if is_sampling else remark(name, cls.__struct_fields__)
                raise TypeError(f"{name} is not an argument of this call{said}")
        return cls(**given)

    @classmethod
    def of_fields(cls, source: object, **others: Any) -> RequestOptions:
        """Return the options that `source` has as attributes other than None, with `others` in their place."""
        given = {name: getattr(source, name, None) for name in cls.__struct_fields__} | others
        return cls(**{name: value for name, value in given.items() if value is not None})


class RequestKeywords(TypedDict, total=False):
    """The fields of `RequestOptions` as keywords of a method that adds one request."""

    priority: int
    first_token_deadline_s: float | None
    tenant: str | None
    cache_salt: str | None
    lora_request: LoRARequest | None


class BatchKeywords(TypedDict, total=False):
    """The fields of `RequestOptions` as keywords of a method that adds several: a value for all, or one for each."""

    priority: int | Sequence[int] | None
    first_token_deadline_s: float | Sequence[float | None] | None
    tenant: str | Sequence[str | None] | None
    cache_salt: str | Sequence[str | None] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None


def options_of_each(num_prompts: int, given: BatchKeywords) -> list[RequestOptions]:
    """Return the options of each prompt. Raises InvalidRequest for a wrong value and for a list of another length."""
    each = {name: one_for_each(num_prompts, name, value) for name, value in given.items() if value is not None}
    return [
        RequestOptions.of_keywords({name: values[index] for name, values in each.items()})
        for index in range(num_prompts)
    ]


def one_for_each(num_prompts: int, name: str, value: Any) -> Sequence[Any]:
    """Return the values of each prompt, given as a list or as one for all. Raises InvalidRequest for another length."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidRequest(
            f"there are {num_prompts} prompts, but {name} has {len(value)} entries; give one for all, or one for each",
            field=name,
        )
    return value


def _check_priority(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not -MAX_PRIORITY - 1 <= value <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority is {value!r}, must be a whole number of 64 bits; smaller ones go first", field="priority"
        )


def _check_deadline(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= sys.float_info.max):
        raise InvalidRequest(
            f"first_token_deadline_s is {value!r}, must be a number of seconds above 0", field="first_token_deadline_s"
        )
