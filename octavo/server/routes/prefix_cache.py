"""`POST /pin_prefix`, `POST /unpin_prefix` and `POST /reset_prefix_cache`."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.generation import in_namespace_of, json_response, named_by_the_client
from octavo.server.keys import caller_of
from octavo.server.schema.tokens import PinPrefixRequest, PrefixRequest


class CacheReset(Struct, frozen=True):
    """Response of `POST /reset_prefix_cache`: the cache is empty."""

    reset: bool = True


class PinPrefixResponse(Struct, frozen=True):
    """Response of `POST /pin_prefix`: leading tokens that are pinned, those of them that are cached already, and why it
    is not the whole prefix (empty when it is)."""

    pinned_tokens: int
    cached_tokens: int
    because: str


class UnpinPrefixResponse(Struct, frozen=True):
    """Response of `POST /unpin_prefix`: whether exactly this prefix was pinned."""

    unpinned: bool


async def pin(context: ServerContext, request: Request) -> Response:
    """Keep a prefix in the cache for a time."""
    asked, [prefix] = await context.texts.read(request, PinPrefixRequest)
    adapter = await context.models.adapter(asked.model)
    prefix = in_namespace_of(caller_of(request), prefix)
    with named_by_the_client(_field_names(asked)):
        pinned = await context.llm.pin_prefix(prefix, asked.ttl_s, asked.cache_salt, adapter)
    return json_response(PinPrefixResponse(pinned.num_tokens, pinned.num_cached_tokens, pinned.because))


async def unpin(context: ServerContext, request: Request) -> Response:
    """Keep a prefix no longer."""
    asked, [prefix] = await context.texts.read(request, PrefixRequest)
    adapter = await context.models.adapter(asked.model)
    prefix = in_namespace_of(caller_of(request), prefix)
    with named_by_the_client(_field_names(asked)):
        unpinned = await context.llm.unpin_prefix(prefix, asked.cache_salt, adapter)
    return json_response(UnpinPrefixResponse(unpinned))


async def reset(context: ServerContext, request: Request) -> Response:
    """Forget all cached prefixes. Raises ApiError 409 while requests run."""
    if not await context.llm.reset_prefix_cache():
        raise ApiError(
            409,
            "the prefix cache is as it was: requests are running, and it is theirs too; ask again when none is",
            code="requests_running",
        )
    return json_response(CacheReset())


def _field_names(asked: PrefixRequest) -> dict[str, str]:
    name = "prompt" if asked.messages is None else "messages"
    return {"prompt": name, "prompt_token_ids": name}
