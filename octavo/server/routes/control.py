"""Endpoints that vLLM has for trainers and operators: they end open requests, count ranks, and forget media."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.output.metric_views import Counts
from octavo.server.context import ServerContext
from octavo.server.decode import RequestBody, read_json, read_optional_json
from octavo.server.errors import conflicts
from octavo.server.generation import names_of
from octavo.server.routes.health import WeightsUpdated

_Label = Annotated[str, Meta(min_length=1)]


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


class WeightVersionRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weight_version`: the label of the weights in use."""

    new_version: _Label


class WeightsLabelled(Struct, frozen=True):
    """Response of `POST /update_weight_version`."""

    new_version: str
    success: bool = True


class FinishedUpdateRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /finish_weight_update`, whose body may be left out."""

    weight_version: _Label | None = None


class WeightInfo(Struct, frozen=True):
    """Response of `GET /weight_info`: the label of the weights in use."""

    weight_version: str


async def label_weights(context: ServerContext, request: Request) -> WeightsLabelled:
    """Give the weights in use a label. Raises InvalidRequest."""
    asked = await read_json(request, WeightVersionRequest)
    await context.llm.update_weight_version(asked.new_version)
    return WeightsLabelled(asked.new_version)


async def finish_update(context: ServerContext, request: Request) -> WeightsUpdated:
    """Give the weights of an update a label; it has ended before. Raises InvalidRequest."""
    asked = await read_optional_json(request, FinishedUpdateRequest)
    await context.llm.finish_weight_update(asked.weight_version)
    return WeightsUpdated("Weight update finished")


async def weight_info(context: ServerContext, request: Request) -> WeightInfo:
    """Return the label of the weights in use. Raises ApiError where replicas have several."""
    with conflicts("weights_differ"):
        return WeightInfo(await context.llm.get_weight_version())


async def abort_requests(context: ServerContext, request: Request) -> RequestsAborted:
    """Abort open requests, also those of other API servers; each returns its output so far."""
    names = (await read_json(request, AbortRequest)).request_ids
    num_elsewhere = 0 if context.abort_at_others is None else await context.abort_at_others(names)
    return RequestsAborted(num_elsewhere + await abort_own(context, names))


async def abort_own(context: ServerContext, names: list[str]) -> int:
    """Abort this server's requests with these ids, or all if there are no ids; return their number."""
    request_ids = [each for each in context.engine_ids if not names or names_of(each).intersection(names)]
    if request_ids:  # else another server may ask while this one has no engine yet
        await context.llm.abort(request_ids)
    return len(request_ids)


def own_counts(context: ServerContext) -> Counts:
    """Return the counts of this server's metrics; none while the model loads, as another server may ask then."""
    return context.llm.metrics.counts() if context.is_loaded else []


async def world_size(context: ServerContext, request: Request) -> WorldSize:
    """Return the number of ranks that compute."""
    asked: WorldQuery = request.state.query
    config = context.llm.config
    return WorldSize(config.device.num_ranks * (config.num_engines if asked.include_dp else 1))


async def reset_media(context: ServerContext, request: Request) -> Response:
    """Return 200: no image or sound outlives its request, but in the prefix cache."""
    return Response()
