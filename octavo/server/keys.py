"""API keys: they decide who may send requests, what each sender may see and do, and who shares cached prefixes."""

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
    """A key is given rights to what shows or changes more than its own requests."""

    CACHE = "cache"
    """It allows to pin and unpin prefixes and to reset the prefix cache."""
    OBSERVE = "observe"
    """It allows to see the metrics, and what the scheduler did with the requests of other keys."""


ALL_RIGHTS: Final = frozenset(Right)


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request is described by the API key that came with it.

    tenant: the name of the API key; without keys what the request names as `user`.
    cache_namespace: a secret made of the key, or of the keys of its group; None where there are no keys.
    """

    tenant: str | None = None
    cache_namespace: str | None = None
    rights: frozenset[Right] = frozenset()

    def may(self, right: Right) -> bool:
        """Return whether the caller has this right."""
        return right in self.rights


ANYBODY: Final = Caller(rights=ALL_RIGHTS)
"""It stands for every sender where the server has no keys."""

_WITHOUT_KEY: Final = Caller()


def key_digest(key: bytes) -> bytes:
    """Return the SHA-256 of a key, by which the server knows it."""
    return hashlib.sha256(key).digest()


def caller_of(request: Request) -> Caller:
    """Return who sends this request."""
    caller: Caller = request.scope["state"].get("caller", ANYBODY)
    return caller


def sender_of(scope: Scope) -> str:
    """Return whose share of memory and time a request takes: the tenant of its key, else the client's address."""
    caller: Caller = scope.get("state", {}).get("caller", ANYBODY)
    return caller.tenant or (scope.get("client") or ("",))[0]


class RequireKey:
    """Lets requests pass that bring one of the keys as `Authorization: Bearer …`, or that ask for an open path.

    callers: the caller of each key, by `key_digest`. The caller of a request is put into `scope["state"]["caller"]`.
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
    """Return the route with a check: callers without this right get 403."""
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
    """Return the path below `root_path`."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
