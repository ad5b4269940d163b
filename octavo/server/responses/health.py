"""The responses of the endpoints about the server itself."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class Drained(Struct, frozen=True):
    """Response of `POST /drain`: the number of open requests that go on elsewhere, or once the replica is ready."""

    moved_requests: int


class EngineState(Struct, frozen=True):
    """The state of an engine core: "ready", "starting" (which on another machine includes that it cannot be connected
    to) or "stopped"."""

    replica: int
    role: str | None
    state: Literal["ready", "starting", "stopped"]


class Health(Struct, frozen=True):
    """Response of `GET /health`."""

    engines: list[EngineState]


class Load(Struct, frozen=True):
    """Response of `GET /load`, in vLLM's words."""

    server_load: int


class Version(Struct):
    """Response of `GET /version`."""

    version: str


class Index(Struct):
    """Response of `GET /`: the endpoints."""

    name: str
    version: str
    model: str
    endpoints: dict[str, Any]
