"""The parameters in the URL of requests, as structs: their types, defaults and descriptions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class NoQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


class SleepQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /sleep`."""

    level: Annotated[int, Meta(ge=1, le=2, description="1 or 2, which do the same")] = 1


class WakeUpQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /wake_up`."""

    tags: Annotated[
        list[Literal["weights", "kv_cache"]], Meta(description="what is needed again; either brings both")
    ] = []


class RequestIdQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`GET /scheduler/decisions` and `GET /scheduler/timelines`."""

    request_id: Annotated[str, Meta(description="the request that is asked about, instead of all")] | None = None


class KvEventsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`GET /kv/events`."""

    after: Annotated[str, Meta(description="the id of the last event that the reader has")] = ""
