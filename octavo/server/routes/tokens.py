"""The endpoints about tokens: of texts, their counts in two APIs for conversations, and those of cached prefixes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import named_by_the_caller
from octavo.server.context import ServerContext
from octavo.server.decode import Refused
from octavo.server.errors import ApiError
from octavo.server.generation import in_namespace_of
from octavo.server.keys import caller_of
from octavo.server.schema.bodies import TokensBody
from octavo.server.schema.messages import CountTokensRequest
from octavo.server.schema.responses import InputTokensRequest
from octavo.server.schema.tokens import DetokenizeRequest, PinPrefixRequest, PrefixRequest, TokenizeRequest

_OFF: Final = ("false", "False", "0")


class ResetQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /reset_prefix_cache`."""

    reset_running_requests: Annotated[bool, Meta(description="let running requests be computed again")] = False
    reset_external: Annotated[
        Any, Refused("kv_disk and kv_host_size keep blocks by their tokens; remove their folder", harmless=_OFF)
    ] = None


class CacheReset(Struct, frozen=True):
    """Response of `POST /reset_prefix_cache`: the cache is empty. success: the same in vLLM's words."""

    reset: bool = True
    success: bool = True


class PinPrefixResponse(Struct, frozen=True):
    """Response of `POST /pin_prefix`: leading tokens that are pinned, those of them that are cached already, and why it
    is not the whole prefix (empty when it is)."""

    pinned_tokens: int
    cached_tokens: int
    because: str


class UnpinPrefixResponse(Struct, frozen=True):
    """Response of `POST /unpin_prefix`: whether exactly this prefix was pinned."""

    unpinned: bool


def _about_tokens(kind: type[TokensBody], summary: str) -> Callable[[ServerContext, Request], Awaitable[Response]]:
    """Make the handler of requests about tokens, which an adapter does not change. summary: docstring of the
    handler."""

    async def respond(context: ServerContext, request: Request) -> Response:
        response = await context.texts.respond(request, kind)
        await context.models.adapter(response.model)  # raises ApiError 404
        return Response(response.body, media_type="application/json")

    respond.__doc__ = summary
    return respond


tokenize = _about_tokens(TokenizeRequest, "Return the token ids of a text or a conversation.")
detokenize = _about_tokens(DetokenizeRequest, "Return the text of token ids.")
count_tokens = _about_tokens(CountTokensRequest, "Return how many tokens a conversation has.")
input_tokens = _about_tokens(InputTokensRequest, "Return how many tokens an input has.")


async def pin_prefix(context: ServerContext, request: Request) -> PinPrefixResponse:
    """Keep a prefix in the cache for a time."""
    asked, [prefix] = await context.texts.read(request, PinPrefixRequest)
    adapter = await context.models.adapter(asked.model)
    prefix = in_namespace_of(caller_of(request), prefix)
    with named_by_the_caller(_field_names(asked)):
        pinned = await context.llm.pin_prefix(prefix, asked.ttl_s, asked.cache_salt, adapter)
    return PinPrefixResponse(pinned.num_tokens, pinned.num_cached_tokens, pinned.because)


async def unpin_prefix(context: ServerContext, request: Request) -> UnpinPrefixResponse:
    """Keep a prefix no longer."""
    asked, [prefix] = await context.texts.read(request, PrefixRequest)
    adapter = await context.models.adapter(asked.model)
    prefix = in_namespace_of(caller_of(request), prefix)
    with named_by_the_caller(_field_names(asked)):
        unpinned = await context.llm.unpin_prefix(prefix, asked.cache_salt, adapter)
    return UnpinPrefixResponse(unpinned)


async def reset_prefix_cache(context: ServerContext, request: Request) -> CacheReset:
    """Forget all cached prefixes. Raises ApiError 409 while requests run, unless they are to be computed again."""
    asked: ResetQuery = request.state.query
    if not await context.llm.reset_prefix_cache(asked.reset_running_requests):
        raise ApiError(
            409,
            "the prefix cache was not reset, because running requests use it; ask again when no request runs, or "
            "set reset_running_requests to compute them again, which needs that no blocks are being moved",
            code="requests_running",
        )
    return CacheReset()


def _field_names(asked: PrefixRequest) -> dict[str, str]:
    name = "prompt" if asked.messages is None else "messages"
    return {"prompt": name, "prompt_token_ids": name}
