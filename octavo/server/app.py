"""The ASGI application: the checks that every request passes before the handler of its endpoint."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config.server_args import ServerArgs
from octavo.core.absent import absent_paths
from octavo.errors import suggestion
from octavo.logging import escaped
from octavo.server.checks import BodyLimits, Fields, HeaderChecks, fields_of, own_hosts
from octavo.server.context import ServerContext
from octavo.server.decode import query_of
from octavo.server.endpoints import ENDPOINTS, Endpoint
from octavo.server.errors import ApiError, ClientDisconnectedError, as_api_error, http_date
from octavo.server.formats.format import check_parsers
from octavo.server.http.websocket import not_by_this_server
from octavo.server.key_file import KeyRing
from octavo.server.keys import EVERYONE, WITHOUT_KEY, Callers, caller_with, check_right, sender_of
from octavo.server.rate_limits import Meter
from octavo.server.shared_bytes import FeatureLimits
from octavo.server.tracing import open_tracer

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")


class App:
    """Passes each request to its endpoint, after the checks of its key, its headers and its body's size.

    Every response has the request's id, which is the client's `X-Request-Id` where that is usable, and a date.
    Prompts and keys are never logged.
    """

    def __init__(self, context: ServerContext, keys: KeyRing) -> None:
        args = context.args
        self.context = context
        self.keys = keys
        self._log_requests = args.log_requests
        self._root_path = args.root_path.rstrip("/")
        self._methods: dict[str, dict[str, Endpoint]] = {}
        for endpoint in ENDPOINTS:
            self._methods.setdefault(endpoint.path.partition("{")[0], {})[endpoint.method] = endpoint
        self._prefixes = [endpoint.path.partition("{")[0] for endpoint in ENDPOINTS if "{" in endpoint.path]
        self._open_paths = {path for each in ENDPOINTS if each.is_open for path in each.paths}
        if args.public_metrics:
            self._open_paths.add("/metrics")
        self._headers = HeaderChecks(
            args.allow_hosts or (own_hosts(args.host) if args.uds is None else None),
            self._open_paths,
            args.allowed_origins,
            {endpoint.path for endpoint in ENDPOINTS if endpoint.is_form},
        )
        self._bodies = BodyLimits(args.max_body_size, args.max_bodies_size or 8 * args.max_body_size)
        self._features = FeatureLimits(args.max_features_size)
        self._app: ASGIApp = self._respond
        if args.allowed_origins:
            # outside of the checks: preflights have no key, and pages can read only errors with CORS headers
            self._app = CORSMiddleware(
                self._respond,
                allow_origins=args.allowed_origins,
                allow_methods=args.allowed_methods,
                allow_headers=args.allowed_headers,
                allow_credentials=args.allow_credentials,
                expose_headers=["X-Request-Id", "Retry-After"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _without_http(scope, receive, send)
            return
        scope["app"] = self
        fields = fields_of(scope["headers"])
        given_id = fields.get(b"x-request-id", b"")
        request_id = given_id.decode() if _REQUEST_ID.fullmatch(given_id) else os.urandom(16).hex()
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, fields=fields, status=0)
        started_at = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                headers = [(b"x-request-id", request_id.encode()), (b"date", http_date())]
                if (meter := state.get("meter")) is not None:
                    headers += meter.headers()
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnectedError:
            state["status"] = 499
        finally:
            if self._log_requests:
                duration_s = time.perf_counter() - started_at
                line = f"{scope['method']} {scope['path']} {state['status']} {duration_s:.3f} s {request_id}"
                logger.info("%s", escaped(line))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        try:
            endpoint = self._endpoint(scope, state["fields"])
            meter: Meter | None = state.get("meter")
            with (
                self._bodies.limited(receive, state["fields"], sender_of(scope)) as limited_receive,
                nullcontext() if meter is None else meter.request(),
                self._features.request(scope),
            ):
                request = Request(scope, limited_receive)
                if endpoint.query is not None:
                    request.state.query = query_of(request, endpoint.query)
                response = await endpoint.handler(self.context, request)
                if not callable(response):
                    response = Response(msgspec.json.encode(response), media_type="application/json")
                await response(scope, limited_receive, send)
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if state["status"]:
                # part of the response was sent: the error can only be reported by closing the connection
                raise
            await as_api_error(error, state["request_id"]).response(self._local_path(scope))(scope, receive, send)

    def _endpoint(self, scope: Scope, fields: Fields) -> Endpoint:
        """Return the endpoint of a request. Raises ApiError for a request that is refused or has none."""
        path, method = self._local_path(scope), scope["method"]
        is_open = path in self._open_paths
        caller = EVERYONE
        if self.keys.callers:
            self.keys.look()
            caller = scope["state"]["caller"] = WITHOUT_KEY if is_open else caller_with(fields, self.keys.callers)
        self._headers.check_host(scope["http_version"], path, fields)
        endpoint = self._endpoint_at(path, method)
        self._headers.check(method, path, fields)
        if endpoint.right is not None and not is_open:
            check_right(endpoint.right, caller, f"{method} {path}")
        if endpoint.is_metered:
            scope["state"]["meter"] = self.keys.meter_of(caller)
        scope["path_params"] = endpoint.parameters(path)
        return endpoint

    def _endpoint_at(self, path: str, method: str) -> Endpoint:
        """Return the endpoint of a path and a method. Raises ApiError 404 or 405."""
        methods = self._methods_of(path)
        if methods is None:
            said = absent_paths().get(path.rstrip("/"))
            nearest = suggestion(path, (endpoint.path for endpoint in ENDPOINTS))
            because = f": {said}" if said else f"; GET / lists the endpoints{nearest}"
            message = f"there is no {method} {path}{because}"
            raise ApiError(404, message, code="unknown_url")
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            allowed = ", ".join(f"{each}, HEAD" if each == "GET" else each for each in methods)
            message = f"{method} {path} is not possible; use {allowed}"
            raise ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
        return endpoint

    def _methods_of(self, path: str) -> Mapping[str, Endpoint] | None:
        """Return the endpoints of a path by their methods; None for a path that no endpoint has."""
        if path in self._methods and path not in self._prefixes:
            return self._methods[path]
        return next((self._methods[each] for each in self._prefixes if path.startswith(each) and path != each), None)

    def _local_path(self, scope: Scope) -> str:
        """Return the path below `root_path`.

        The HTTP server puts `root_path` before every path. A proxy may strip it or leave it in requests, in which case
        the path has it twice.
        """
        path, root = str(scope["path"]), str(scope.get("root_path", ""))
        path = path.removeprefix(root) if root and path.startswith(root + "/") else path
        root = self._root_path
        if root and f"{path}/".startswith(root + "/") and self._methods_of(path) is None:
            return path.removeprefix(root) or "/"
        return path


async def _without_http(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a WebSocket that another HTTP server has read; acknowledge startup and shutdown of the application."""
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close"})
        else:
            await not_by_this_server().response()(scope, receive, send)
        return
    message: Message = {"type": ""}
    while message["type"] != "lifespan.shutdown":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})


def loading_app(args: ServerArgs, callers: Callers | None = None) -> App:
    """Return an application whose model loads: `context.attach` gives it the engine.

    callers: what `read_callers(args)` returned, if the keys were read before. Raises ConfigError for wrong keys,
    and for parsers that are not known.
    """
    check_parsers(args.tool_call_parser, args.reasoning_parser)
    return App(ServerContext(args, tracer=open_tracer(args.otlp_traces_endpoint)), KeyRing(args, callers))


def build_app(llm: AsyncLLM, args: ServerArgs) -> App:
    """Return the application that serves `llm`. Raises ConfigError for wrong keys."""
    app = loading_app(args)
    app.context.attach(llm)
    return app
