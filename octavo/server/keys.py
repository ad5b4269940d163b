"""API keys: who sends a request, what its key allows, and with whom it shares cached prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError


class Right(StrEnum):
    """What a key may be given beyond requests of its own."""

    CACHE = "cache"
    """Pin and unpin prefixes, and reset the prefix cache."""
    OBSERVE = "observe"
    """See the metrics, and what the scheduler did with the requests of other keys."""


ALL_RIGHTS: Final = frozenset(Right)


class Caller(msgspec.Struct, frozen=True):
    """Who sends a request.

    tenant: the name of the API key; without keys what the request names as `user`.
    cache_namespace: a secret made of the key, or of the keys of its group; None where there are no keys.
    """

    tenant: str | None = None
    cache_namespace: str | None = None
    rights: frozenset[Right] = frozenset()

    def may(self, right: Right) -> bool:
        """Whether the caller has this right."""
        return right in self.rights


ANYBODY: Final = Caller(rights=ALL_RIGHTS)
"""Who sends a request to a server without keys."""

_WITHOUT_KEY: Final = Caller()


def key_digest(key: bytes) -> bytes:
    """By which a key is known here: its SHA-256."""
    return hashlib.sha256(key).digest()


def caller_of(request: Request) -> Caller:
    """Who sends this request."""
    caller: Caller = request.scope["state"].get("caller", ANYBODY)
    return caller


class RequireKey:
    """Lets requests pass that bring one of the keys as `Authorization: Bearer …`, or that ask for an open path.

    callers: by `key_digest`. Who sent a request is in `scope["state"]["caller"]`.
    """

    def __init__(self, app: ASGIApp, callers: Mapping[bytes, Caller], open_paths: Collection[str]) -> None:
        self._app = app
        self._callers = callers
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = _WITHOUT_KEY if local_path(scope) in self._open_paths else self._caller(scope)
        if caller is None:
            error = ApiError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = value.partition(b" ")
        # how long the look-up takes depends on the digest, which nobody can bring near to another one
        return self._callers.get(key_digest(key.strip())) if scheme.lower() == b"bearer" else None


def with_right(route: Route, right: Right) -> Route:
    """The route for callers that have this right; others get 403."""
    endpoint = route.endpoint

    async def checked(request: Request) -> Any:
        caller = caller_of(request)
        if not caller.may(right):
            raise ApiError(
                403,
                f"{request.method} {route.path} needs the right {right}, which the API key {caller.tenant} does not "
                f"have; list it in the key's rights (--api-key-file), or send a key of --admin-api-key",
                code="missing_right",
            )
        return await endpoint(request)

    return Route(route.path, checked, methods=list(route.methods or ()))


def local_path(scope: Scope) -> str:
    """The path below `root_path`."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
