"""The responses of the endpoints that put an engine to sleep and give it other weights."""

from __future__ import annotations

from msgspec import Struct


class SleepState(Struct, frozen=True):
    """Response of `GET /is_sleeping`, `POST /sleep` and `POST /wake_up`."""

    is_sleeping: bool


class WeightsUpdated(Struct, frozen=True):
    """Response of `POST /update_weights_from_disk`, with the fields of SGLang."""

    message: str
    success: bool = True
