"""The ASGI application: endpoints, middleware and errors put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from octavo.config.args import EngineArgs, ServerArgs
from octavo.errors import OctavoError
from octavo.server.context import ServerContext
from octavo.server.errors import answer_error
from octavo.server.guards import GuardHeaders, own_hosts
from octavo.server.keys import RequireKey
from octavo.server.middleware import AcceptRootPath, LimitBody, RequestContext
from octavo.server.open_requests import OpenRequests
from octavo.server.routes import chat, completions, health, models, prefix_cache, scheduler, tokens
from octavo.server.serving import run

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

_FAMILIES = (health, models, completions, chat, tokens, prefix_cache, scheduler)


def build_app(llm: AsyncLLM, args: ServerArgs, open_requests: OpenRequests | None = None) -> Starlette:
    """The application that answers for `llm`. `open_requests` lets the caller see and end what is in progress."""
    context = ServerContext(llm, args, OpenRequests() if open_requests is None else open_requests)
    routes = [route for family in _FAMILIES for route in family.routes(context)]
    app = Starlette(
        routes=routes,
        middleware=_middleware(args, lambda path: any(route.path_regex.match(path) for route in routes)),
        exception_handlers={HTTPException: answer_error, OctavoError: answer_error},
    )
    app.router.redirect_slashes = False
    return app


def _middleware(args: ServerArgs, is_route: Callable[[str], bool]) -> list[Middleware]:
    """From the outside in. A browser asks about origins without a key, and reads refusals only with CORS headers."""
    layers = [Middleware(RequestContext, log_requests=args.log_requests)]
    if root_path := args.root_path.rstrip("/"):
        layers.append(Middleware(AcceptRootPath, root_path=root_path, is_route=is_route))
    if args.allow_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=args.allow_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    if args.api_key:
        layers.append(Middleware(RequireKey, keys=args.api_key, open_paths=health.OPEN_PATHS))
    hosts = args.allow_hosts or own_hosts(args.host)
    layers.append(Middleware(GuardHeaders, hosts=hosts, origins=args.allow_origins))
    layers.append(Middleware(LimitBody, max_bytes=args.max_body_size))
    return layers


def serve(engine_args: EngineArgs, server_args: ServerArgs) -> int:
    """Serve a model until a signal or the engine's end; returns the exit code, 0 after a signal.

    Raises ConfigError when the address cannot be used, which is known before the model is loaded, and what
    AsyncLLM.start raises.
    """
    return run(engine_args, server_args, build_app)
