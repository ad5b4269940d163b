"""What every HTTP request passes through, in plain ASGI: its id and date, its path, the limit of its body."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.logging import escaped
from octavo.server.errors import ApiError, ClientDisconnectedError, as_api_error
from octavo.server.keys import sender_of

logger = logging.getLogger(__name__)

_UNCOUNTED_BYTES = 64 << 10
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestContext:
    """Gives each request an id (the client's `X-Request-Id` where it is usable) and answers what nobody else caught.

    The id is in `scope["state"]["request_id"]` and in the answer's headers. Prompts and keys are never logged.
    """

    def __init__(self, app: ASGIApp, log_requests: bool) -> None:
        self._app = app
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        started_at = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                date = formatdate(usegmt=True).encode()
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"date", date),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnectedError:
            status = 499
        except Exception as error:
            if status:
                # half an answer is out: cutting the connection is the one way left to say so
                raise
            await as_api_error(error, request_id).response()(scope, receive, send_with_headers)
        finally:
            if self._log_requests:
                duration_s = time.perf_counter() - started_at
                line = f"{scope['method']} {scope['path']} {status} {duration_s:.3f} s {request_id}"
                logger.info("%s", escaped(line))


class AcceptRootPath:
    """Lets a proxy that serves the server below `root_path` leave that path in requests, or strip it.

    The HTTP server puts `root_path` before every path, so that one that still had it has it twice.
    """

    def __init__(self, app: ASGIApp, root_path: str, is_route: Callable[[str], bool]) -> None:
        self._app = app
        self._root_path = root_path
        self._is_route = is_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root, sent = self._root_path, scope["path"].removeprefix(self._root_path)
            if (sent + "/").startswith(root + "/") and not self._is_route(sent):
                raw_path = scope["raw_path"].removeprefix(root.encode())
                scope = {**scope, "path": sent if sent != root else root + "/", "raw_path": raw_path}
        await self._app(scope, receive, send)


class LimitBody:
    """Refuses bodies of more than `max_bytes` with 413, whether their length is announced or not, and with 503 bodies
    for which there is no room beside those of other open requests.

    max_total_bytes: of all bodies together; the first 64 KiB of each are not counted. One tenant, or without keys one
    address, may have half of it, but always one body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._max_bytes_per_sender = max(max_bytes, max_total_bytes // 2)
        self._num_bytes = 0
        self._num_bytes_of: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sender = sender_of(scope)
        num_bytes = num_counted = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes, num_counted
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large()
                more = max(0, num_bytes - _UNCOUNTED_BYTES) - num_counted
                self._count(sender, more)
                num_counted += more
            return message

        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        try:
            await self._app(scope, limited_receive, send)
        finally:
            self._count(sender, -num_counted)

    def _count(self, sender: str, num_bytes: int) -> None:
        """Count bytes that are held, or with a negative number released. Raises ApiError when there is no room."""
        if not num_bytes:
            return
        of_sender = self._num_bytes_of[sender] + num_bytes
        if num_bytes > 0 and (
            of_sender > self._max_bytes_per_sender or self._num_bytes + num_bytes > self._max_total_bytes
        ):
            raise ApiError(
                503,
                f"the bodies of open requests take up their room of {self._max_total_bytes:,} bytes, half of it for "
                "one client; come back later, or start the server with a larger --max-bodies-size",
                code="too_many_bodies",
                headers={"Retry-After": "1"},
            )
        self._num_bytes += num_bytes
        self._num_bytes_of[sender] = of_sender
        if not of_sender:
            del self._num_bytes_of[sender]

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes:,} bytes; send less, or start the server with a larger "
            "--max-body-size",
            code="request_body_too_large",
            headers={"Connection": "close"},
        )
