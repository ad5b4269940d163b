"""The ASGI application: endpoints, middleware and errors put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.core_spawn import SpawnedCore
from octavo.errors import OctavoError
from octavo.server.context import ServerContext
from octavo.server.errors import answer_error
from octavo.server.guards import GuardHeaders, own_hosts
from octavo.server.key_file import check_tenant_weights, describe, read_callers
from octavo.server.keys import Caller, RequireKey, with_right
from octavo.server.middleware import AcceptRootPath, LimitBody, RequestContext
from octavo.server.open_requests import OpenRequests
from octavo.server.openapi import ENDPOINTS
from octavo.server.preparation import TextPolicy
from octavo.server.routes import chat, completions, health, models, prefix_cache, scheduler, tokens
from octavo.server.serving import run
from octavo.server.texts import Texts

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_FAMILIES = (health, models, completions, chat, tokens, prefix_cache, scheduler)


def build_app(
    llm: AsyncLLM,
    args: ServerArgs,
    open_requests: OpenRequests | None = None,
    *,
    callers: Mapping[bytes, Caller] | None = None,
) -> Starlette:
    """The application that answers for `llm`. `open_requests` lets the caller see and end what is in progress.

    callers: what `read_callers(args)` returned, for those who read the keys before. Raises ConfigError for wrong keys.
    """
    policy = TextPolicy(args.trust_request_chat_template, args.allow_special_tokens_in_content)
    open_requests = OpenRequests() if open_requests is None else open_requests
    context = ServerContext(llm, args, Texts.of(llm, policy, open_requests), open_requests)
    callers = read_callers(args) if callers is None else callers
    if callers:
        logger.info("%s", describe(callers))
    open_paths = {each.path for each in ENDPOINTS if each.is_open or (each.path == "/metrics" and args.public_metrics)}
    rights = {each.path: each.right for each in ENDPOINTS if each.right is not None and each.path not in open_paths}
    routes = [route for family in _FAMILIES for route in family.routes(context)]
    routes = [with_right(route, rights[route.path]) if route.path in rights else route for route in routes]
    app = Starlette(
        routes=routes,
        middleware=_middleware(
            args, lambda path: any(route.path_regex.match(path) for route in routes), callers, open_paths
        ),
        exception_handlers={HTTPException: answer_error, OctavoError: answer_error},
    )
    app.router.redirect_slashes = False
    return app


def _middleware(
    args: ServerArgs, is_route: Callable[[str], bool], callers: Mapping[bytes, Caller], open_paths: Collection[str]
) -> list[Middleware]:
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
    if callers:
        layers.append(Middleware(RequireKey, callers=callers, open_paths=open_paths))
    hosts = args.allow_hosts or own_hosts(args.host)
    layers.append(Middleware(GuardHeaders, hosts=hosts, open_paths=open_paths, origins=args.allow_origins))
    layers.append(
        Middleware(
            LimitBody, max_bytes=args.max_body_size, max_total_bytes=args.max_bodies_size or 8 * args.max_body_size
        )
    )
    return layers


def serve(engine_args: EngineArgs, server_args: ServerArgs, core: SpawnedCore | None = None) -> int:
    """Serve a model until a signal or the engine's end; returns the exit code, 0 after a signal.

    `core` is the process for the engine, where it has been started already.

    Raises ConfigError when the keys or the address cannot be used, which is known before the model is loaded, and what
    AsyncLLM.start raises.
    """
    callers = read_callers(server_args)
    check_tenant_weights(engine_args.tenant_weights, callers)
    return run(engine_args, server_args, partial(build_app, callers=callers), core)
