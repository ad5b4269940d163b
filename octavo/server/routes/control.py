"""Endpoints that vLLM has for trainers and operators: they end open requests, count ranks, and forget media."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.decode import RequestBody, read_json
from octavo.server.errors import ApiError
from octavo.server.generation import names_of


class AbortRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /abort_requests`: ids of responses, or of the engine's requests; without any, all open requests."""

    request_ids: list[str] = []


class RequestsAborted(Struct, frozen=True):
    """Response of `POST /abort_requests`, in vLLM's words. aborted: requests to the engine, one for each prompt."""

    aborted: int
    status: Literal["aborted"] = "aborted"


class WorldQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`GET /get_world_size`."""

    include_dp: Annotated[bool, Meta(description="count the ranks of all engines, not those of one")] = True


class WorldSize(Struct, frozen=True):
    """Response of `GET /get_world_size`."""

    world_size: int


async def abort_requests(context: ServerContext, request: Request) -> RequestsAborted:
    """End open requests, each with what there is of it. Raises ApiError where other servers have some of them."""
    asked = await read_json(request, AbortRequest)
    if context.counts_of_others is not None:
        raise ApiError(
            409,
            "this is one of several API servers, which may not have the request; end a request by closing its "
            "connection, and all of them by POST /pause with mode=abort and POST /resume",
            code="several_servers",
        )
    request_ids = list(context.engine_ids)
    if asked.request_ids:
        names = {*asked.request_ids}
        request_ids = [each for each in request_ids if names & names_of(each)]
    await context.llm.abort(request_ids)
    return RequestsAborted(len(request_ids))


async def world_size(context: ServerContext, request: Request) -> WorldSize:
    """Return the number of ranks that compute."""
    asked: WorldQuery = request.state.query
    config = context.llm.config
    return WorldSize(config.device.num_ranks * (config.num_engines if asked.include_dp else 1))


async def reset_media(context: ServerContext, request: Request) -> Response:
    """Return 200: no image or sound outlives its request, but in the prefix cache."""
    return Response()
