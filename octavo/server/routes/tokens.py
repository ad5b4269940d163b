"""The endpoints about tokens: `POST /tokenize`, `/detokenize`, and the counts of two APIs for conversations."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.schema.messages import CountTokensRequest
from octavo.server.schema.responses import InputTokensRequest
from octavo.server.schema.tokens import DetokenizeRequest, TokenizeRequest
from octavo.server.texts import TokensRequest


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    return await _respond(context, request, TokenizeRequest)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Return the text of token ids."""
    return await _respond(context, request, DetokenizeRequest)


async def count_tokens(context: ServerContext, request: Request) -> Response:
    """Return how many tokens a conversation has."""
    return await _respond(context, request, CountTokensRequest)


async def input_tokens(context: ServerContext, request: Request) -> Response:
    """Return how many tokens an input has."""
    return await _respond(context, request, InputTokensRequest)


async def _respond(context: ServerContext, request: Request, kind: type[TokensRequest]) -> Response:
    """Return the response to a request about tokens, which an adapter does not change. Raises ApiError 404."""
    response = await context.texts.respond(request, kind)
    await context.models.adapter(response.model)
    return Response(response.body, media_type="application/json")
