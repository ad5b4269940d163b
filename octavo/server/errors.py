"""Errors in the form of the OpenAI API: always one nested object, and a status that clients understand."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Literal
from uuid import uuid4

import msgspec
from starlette.responses import Response

from octavo.core.outputs import RequestError
from octavo.errors import (
    ContextTooLong,
    EngineDeadError,
    EngineRestartingError,
    EngineUnresponsiveError,
    InvalidRequest,
    OctavoError,
    RequestFailed,
)

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MESSAGES_TYPES = {413: "request_too_large", 503: "overloaded_error"}
"""Types that Anthropic's API alone has, by status."""

STATUS_OF_REFUSALS = {"queue_full": 429, "deadline_unreachable": 503, "engine_restarting": 503}
"""The status of refusals after which the client may try again, by code."""


class ErrorObject(msgspec.Struct, frozen=True):
    """An error: a line for a person, its kind, the field that it is about, and a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response whose status is not 2xx."""

    error: ErrorObject


class MessagesError(msgspec.Struct, frozen=True):
    """An error in the form of Anthropic's API."""

    type: str
    message: str
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """The body of every response of `/v1/messages` whose status is not 2xx."""

    error: MessagesError
    type: Literal["error"] = "error"


def error_kind(path: str) -> type[ErrorBody] | type[MessagesErrorBody]:
    """Return the form of the errors of the endpoint at a path."""
    return MessagesErrorBody if path.startswith("/v1/messages") else ErrorBody


class ApiError(OctavoError):
    """An error with an HTTP status. `param` names a field of the request, `code` is a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorBody(ErrorObject(str(self), kind, self.param, self.code))

    @property
    def messages_body(self) -> MessagesErrorBody:
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_TYPES.get(self.status) or _TYPES.get(self.status, other)
        # from these the clients of this API know that they have to compact the conversation, or to send it whole
        is_too_long = self.code == ContextTooLong.code and self.param != "max_tokens"
        begin = "prompt is too long: " if is_too_long else ""
        details: dict[str, Any] = {"error_code": self.code, "unsupported": [self.param]}
        is_thread = self.code == "thread_unsupported_request"
        return MessagesErrorBody(MessagesError(kind, f"{begin}{self}", details if is_thread else msgspec.UNSET))

    def response(self, path: str = "") -> Response:
        """Return the response of the endpoint at this path."""
        body = self.messages_body if error_kind(path) is MessagesErrorBody else self.body
        return Response(msgspec.json.encode(body), self.status, headers=self.headers, media_type="application/json")


NOT_AGAIN: Final = {"x-should-retry": "false"}
"""The header by which clients of OpenAI and Anthropic, and Claude Code, do not send a request again."""


class ClientDisconnectedError(ConnectionError):
    """The client has closed its connection, so that no response can be sent."""


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="server_shutting_down", headers={"Connection": "close"})


def ended_with_error(error: RequestError, *, shows_others: bool = False) -> ApiError:
    """Return the error for an accepted request that ended with an error of its own.

    shows_others: the client may learn how much others have sent. Otherwise the message has no numbers of others, and
    `Retry-After` is rounded up to a power of two.
    """
    status = STATUS_OF_REFUSALS.get(error.code) or (400 if error.is_client_error else 500)
    message, seconds = error.message, error.retry_after_s
    if not shows_others:
        message = error.public_message or message
        seconds = None if seconds is None else 1 << (seconds - 1).bit_length()
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    if error.code == "request_quarantined":
        headers |= NOT_AGAIN
    return ApiError(status, message, param=error.field, code=error.code, headers=headers)


def as_api_error(error: Exception, request_id: str = "") -> ApiError:
    """Return the error for any exception. An unexpected one is logged, and the client does not get its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field, code=error.code)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has stopped: {error}", code="engine_dead")
    if isinstance(error, EngineRestartingError):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ApiError(503, str(error), code="engine_restarting", headers=headers)
    if isinstance(error, EngineUnresponsiveError):
        return ApiError(503, str(error), code="engine_unresponsive")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), code="request_failed")
    logger.error("request %s failed: %s: %s", request_id, type(error).__name__, error, exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


@contextmanager
def conflicts(code: str) -> Iterator[None]:
    """Raise a RequestFailed from inside as ApiError 409 with this code: it conflicts with the state of the engine."""
    try:
        yield
    except RequestFailed as error:
        raise ApiError(409, str(error), code=code) from error


def http_date() -> bytes:
    return _date_at(int(time.time()))


@lru_cache(1)
def _date_at(seconds: int) -> bytes:
    return formatdate(seconds, usegmt=True).encode()


def raw_response(error: ApiError) -> bytes:
    """Return the bytes of an error response that the HTTP protocol sends by itself, without the application."""
    response = error.response()
    headers = {
        **dict(response.raw_headers),
        b"connection": b"close",
        b"date": http_date(),
        b"x-request-id": uuid4().hex.encode(),
    }
    lines = b"".join(b"%s: %s\r\n" % header for header in headers.items())
    start = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return start + lines + b"\r\n" + bytes(response.body)
