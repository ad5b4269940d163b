"""`POST /sleep`, `POST /wake_up`, `GET /is_sleeping` and `POST /update_weights_from_disk`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestFailed
from octavo.server.context import ServerContext
from octavo.server.decode import RequestBody, decode, read_body
from octavo.server.errors import ApiError
from octavo.server.generation import json_response


class SleepQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /sleep`."""

    level: Annotated[int, Meta(ge=1, le=2, description="1 or 2, which do the same")] = 1


class WakeUpQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /wake_up`."""

    tags: Annotated[
        list[Literal["weights", "kv_cache"]], Meta(description="what is needed again; either brings both")
    ] = []


class UpdateWeightsRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights_from_disk`: the directory, or the file, of another checkpoint of the same model."""

    model_path: str


class SleepState(Struct, frozen=True):
    """Response of `GET /is_sleeping`, `POST /sleep` and `POST /wake_up`."""

    is_sleeping: bool


class WeightsUpdated(Struct, frozen=True):
    """Response of `POST /update_weights_from_disk`, with the fields of SGLang."""

    message: str
    success: bool = True


async def is_sleeping(context: ServerContext, request: Request) -> Response:
    """Return whether the engine has given back the memory of its weights and its KV cache."""
    return json_response(SleepState(await context.llm.is_sleeping()))


async def sleep(context: ServerContext, request: Request) -> Response:
    """Give back the memory of weights and KV cache; requests wait. Raises ApiError or InvalidRequest."""
    asked: SleepQuery = request.state.query
    with _refusals(context):
        await context.llm.sleep(asked.level)
    return json_response(SleepState(True))


async def wake_up(context: ServerContext, request: Request) -> Response:
    """Load the weights again. Raises ApiError or InvalidRequest."""
    asked: WakeUpQuery = request.state.query
    with _refusals(context):
        await context.llm.wake_up(asked.tags)
    return json_response(SleepState(False))


async def update_weights(context: ServerContext, request: Request) -> Response:
    """Go on with the weights of another checkpoint of the same model. Raises ApiError or InvalidRequest."""
    asked = decode(b"".join(await read_body(request)), UpdateWeightsRequest)
    with _refusals(context):
        await context.llm.update_weights_from_disk(asked.model_path)
    return json_response(WeightsUpdated(f"the weights are those of {asked.model_path}"))


@contextmanager
def _refusals(context: ServerContext) -> Iterator[None]:
    if not context.llm.config.model.enable_sleep_mode:
        raise ApiError(
            403, "this engine keeps its weights and its memory; start the server with --enable-sleep-mode", code="awake"
        )
    try:
        yield
    except RequestFailed as error:
        raise ApiError(409, str(error), code="weights_unchanged") from error
