"""The endpoints for operators: `GET /health`, `/ready`, `/load`, `/version`, `/metrics`, `POST /drain` and others."""

from __future__ import annotations

import asyncio
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.engine.metrics import CONTENT_TYPE
from octavo.server.context import ServerContext
from octavo.server.decode import RequestBody, decode, read_body
from octavo.server.errors import shutting_down
from octavo.server.generation import json_response


class DrainRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /drain`: the number of a replica, and whether it is stopped instead of started again."""

    replica: int = 0
    stop: bool = False


class Drained(Struct, frozen=True):
    """Response of `POST /drain`: the number of open requests that go on elsewhere, or once the replica is ready."""

    moved_requests: int


class EngineState(Struct, frozen=True):
    """The state of an engine core: "ready", "starting" (which on another machine includes that it cannot be connected
    to) or "stopped"."""

    replica: int
    role: str | None
    state: Literal["ready", "starting", "stopped"]


class Health(Struct, frozen=True):
    """Response of `GET /health`."""

    engines: list[EngineState]


class Load(Struct, frozen=True):
    """Response of `GET /load`, in vLLM's words."""

    server_load: int


class Version(Struct):
    """Response of `GET /version`."""

    version: str


async def health(context: ServerContext, request: Request) -> Response:
    """Return the state of each engine core while one is ready.

    Raises EngineRestartingError, EngineDeadError or EngineUnresponsiveError.
    """
    await context.llm.check_health()
    states = [EngineState(each.number, each.role, each.state) for each in context.llm.replicas]
    return json_response(Health(states))


async def ready(context: ServerContext, request: Request) -> Response:
    """Return whether requests are served: not while the model loads, while no core is ready, nor once the server stops.

    Raises as `health` does, and ApiError.
    """
    if context.open_requests.is_closing:
        raise shutting_down()
    return await health(context, request)


async def load(context: ServerContext, request: Request) -> Response:
    """Return the number of open requests."""
    return json_response(Load(len(context.open_requests)))


async def tokenizer_info(context: ServerContext, request: Request) -> Response:
    """Return the settings of the tokenizer, with the chat template in use."""
    return json_response(context.llm.input.tokenizer_info)


async def drain(context: ServerContext, request: Request) -> Response:
    """Move the requests of a replica to others, and start it again or stop it. Raises InvalidRequest."""
    asked = decode(b"".join(await read_body(request)), DrainRequest)
    return json_response(Drained(await context.llm.drain(asked.replica, stop=asked.stop)))


async def version(context: ServerContext, request: Request) -> Response:
    """Return the version of octavo."""
    return json_response(Version(__version__))


async def metrics(context: ServerContext, request: Request) -> Response:
    """Return the metrics as Prometheus reads them."""
    others = [] if context.counts_of_others is None else await context.counts_of_others()
    # takes milliseconds, during which no stream would be sent
    text = await asyncio.to_thread(context.llm.metrics.render, vllm_names=context.args.vllm_metrics, others=others)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})
