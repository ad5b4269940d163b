"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.server.context import ServerContext
from octavo.server.schema import DetokenizeRequest, TokenizeRequest


def routes(context: ServerContext) -> list[Route]:
    async def tokenize(request: Request) -> Response:
        return await context.texts.answer(request, TokenizeRequest)

    async def detokenize(request: Request) -> Response:
        return await context.texts.answer(request, DetokenizeRequest)

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
