"""API keys: they decide who may send requests, what each sender may see and do, and who shares cached prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from octavo.server.errors import NOT_AGAIN, ApiError
from octavo.server.rate_limits import RateLimits


class Right(StrEnum):
    """A right allows a key to see or change more than its own requests."""

    CACHE = "cache"
    """It allows to pin and unpin prefixes and to reset the prefix cache."""
    OBSERVE = "observe"
    """It allows to see the metrics, and what the scheduler did with the requests of other keys."""
    OPERATE = "operate"
    """It allows to drain a replica, to pause generation, to let the engine sleep, and to load adapters and weights."""
    KV_EVENTS = "kv-events"
    """It allows to read the digests of the blocks in the prefix caches, those of all keys."""


_KEY_OF_PAGE: Final = b"openai-insecure-api-key."

ALL_RIGHTS: Final = frozenset(Right)


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request, as the API key of the request describes it.

    tenant: the name of the API key; without keys what the request names as `user`.
    cache_namespace: a secret derived from the key, or from the keys of its group; None where there are no keys. limits:
    the rate limits of the key; None for no limits.
    """

    tenant: str | None = None
    cache_namespace: str | None = None
    rights: frozenset[Right] = frozenset()
    limits: RateLimits | None = None

    def may(self, right: Right) -> bool:
        return right in self.rights


Callers = Mapping[bytes, Caller]
"""The caller of each API key, by `key_digest`."""

EVERYONE: Final = Caller(rights=ALL_RIGHTS)
"""Every sender where the server has no keys."""

WITHOUT_KEY: Final = Caller()
"""The sender of a request for an open path, whether it has a key or not."""


def key_digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key, by which the server knows it."""
    return hashlib.sha256(key).digest()


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["state"].get("caller", EVERYONE)
    return caller


def sender_of(scope: Scope) -> str:
    """Return the name under which a request's memory and time are counted: the tenant of its key, else the client's
    address."""
    caller: Caller = scope.get("state", {}).get("caller", EVERYONE)
    return caller.tenant or (scope.get("client") or ("",))[0]


def caller_with(fields: Mapping[bytes, bytes], callers: Callers) -> Caller:
    """Return who sends a request with the key in `Authorization`, or without it in `x-api-key`. Raises ApiError 401."""
    scheme, _, key = fields.get(b"authorization", b"").partition(b" ")
    if not scheme:
        key = fields.get(b"x-api-key", b"") or _key_of_page(fields)
    # the time of the look-up depends on the digest alone, so it does not show how much of a key was right
    caller = callers.get(key_digest(key.strip())) if scheme.lower() in (b"bearer", b"") else None
    if caller is None:
        message = "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer", **NOT_AGAIN})
    return caller


def _key_of_page(fields: Mapping[bytes, bytes]) -> bytes:
    """Return the key among the subprotocols of a WebSocket, where pages put it as in OpenAI's API: a browser lets them
    send no other header. Empty for none."""
    offered = (each.strip() for each in fields.get(b"sec-websocket-protocol", b"").split(b","))
    return next((each.removeprefix(_KEY_OF_PAGE) for each in offered if each.startswith(_KEY_OF_PAGE)), b"")


def check_right(right: Right, caller: Caller, asked: str) -> None:
    """Raise ApiError 403 when the sender of a request does not have the right that it needs."""
    if not caller.may(right):
        raise ApiError(
            403,
            f"{asked} needs the right {right}, which the API key {caller.tenant} does not have; list it in the key's "
            "rights (--api-key-file), or send a key of --admin-api-key",
            code="missing_right",
        )
