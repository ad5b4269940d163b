"""API keys: who may ask, and who asked."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import ApiError


class RequireKey:
    """Lets requests pass that bring one of the keys as `Authorization: Bearer …`, or that ask for an open path.

    Who sent it is in `scope["state"]["tenant"]`: the place of its key among the keys, such as "key-1", never the key.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]) -> None:
        self._app = app
        # digests are of one length, so that a comparison takes the same time whatever was sent
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _local_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        place = self._place_of_key(scope)
        if place is None:
            error = ApiError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = f"key-{place + 1}"
        await self._app(scope, receive, send)

    def _place_of_key(self, scope: Scope) -> int | None:
        value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = value.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _local_path(scope: Scope) -> str:
    """The path below `root_path`."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
