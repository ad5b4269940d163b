"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.schema.tokens import DetokenizeRequest, TokenizeRequest


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    return await context.texts.answer(request, TokenizeRequest)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Return the text of token ids."""
    return await context.texts.answer(request, DetokenizeRequest)
