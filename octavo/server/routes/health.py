"""`GET /health`, `/version`, `/metrics` and `/`: what those who run the server ask for."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo import __version__
from octavo.engine.metrics import CONTENT_TYPE
from octavo.server.context import ServerContext
from octavo.server.generation import json_response
from octavo.server.openapi import ENDPOINTS, document
from octavo.server.responses import Index, Version


def routes(context: ServerContext) -> list[Route]:
    async def health(request: Request) -> Response:
        await context.llm.check_health()
        return Response(status_code=200)

    async def version(request: Request) -> Response:
        return json_response(Version(__version__))

    async def metrics(request: Request) -> Response:
        # takes milliseconds, in which streams would stand still
        text = await asyncio.to_thread(context.llm.metrics.render)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def index(request: Request) -> Response:
        endpoints = {f"{endpoint.method} {endpoint.path}": endpoint.description for endpoint in ENDPOINTS}
        return json_response(Index("octavo", __version__, context.model_names[0], endpoints))

    async def openapi(request: Request) -> Response:
        return Response(msgspec.json.encode(document()), media_type="application/json")

    return [
        Route("/", index, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
    ]
