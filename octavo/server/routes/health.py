"""The endpoints for operators: state and metrics, draining, pauses, sleep and other weights."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.engine.output.metrics import CONTENT_TYPE
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.decode import Refused, RequestBody, read_json, read_optional_json
from octavo.server.errors import ApiError, conflicts, shutting_down

PauseMode = Literal["abort", "wait", "keep"]
_WHOLE_PROFILE: Final = Refused("a profile begins at once, and lasts until POST /stop_profile", harmless=(0,))
_MODE = "what becomes of open requests: they are aborted, those that have begun end, or all go on afterwards"


class DrainRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /drain`: the number of a replica, and whether it is stopped instead of started again."""

    replica: int = 0
    stop: bool = False


class Drained(Struct, frozen=True):
    """Response of `POST /drain`: the number of open requests that go on elsewhere, or once the replica is ready."""

    moved_requests: int


class EngineState(Struct, frozen=True):
    """The state of an engine core: "ready", "starting" (which on another machine includes that it cannot be connected
    to) or "stopped"; and whether a pause or a sleep holds its requests back."""

    replica: int
    role: str | None
    state: Literal["ready", "starting", "stopped"]
    is_paused: bool = False
    is_sleeping: bool = False


class Health(Struct, frozen=True):
    """Response of `GET /health`."""

    engines: list[EngineState]


class Load(Struct, frozen=True):
    """Response of `GET /load`, in vLLM's words."""

    server_load: int


class Version(Struct):
    """Response of `GET /version`."""

    version: str


class PauseQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /pause`."""

    mode: Annotated[PauseMode, Meta(description=_MODE)] = "abort"
    clear_cache: Annotated[bool, Meta(description="forget cached prefixes and pins")] = True


class Paused(Struct, frozen=True):
    """Response of `POST /pause` and `POST /resume`, in vLLM's words."""

    status: Literal["paused", "resumed"]


class PauseState(Struct, frozen=True):
    """Response of `GET /is_paused`."""

    is_paused: bool


class SleepQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /sleep`."""

    level: Annotated[int, Meta(ge=0, le=2, description="1 or 2, which do the same; 0 is a pause")] = 1
    mode: Annotated[PauseMode, Meta(description=_MODE)] = "keep"


class WakeUpQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /wake_up`."""

    tags: Annotated[
        list[Literal["weights", "kv_cache", "scheduling"]],
        Meta(description="what is needed again; each brings everything"),
    ] = []


class UpdateWeightsRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights_from_disk`: the directory, or the file, of another checkpoint of the same model."""

    model_path: str


class WeightFolderRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /update_weights`: the directory of another checkpoint, as prime-rl sends it."""

    weight_dir: str | None = None

    update_info: Annotated[
        Any, Refused("weights come as a checkpoint; write one, and give its directory as weight_dir")
    ] = None

    def check(self) -> None:
        """Raise InvalidRequest where there is no directory."""
        super().check()
        if self.weight_dir is None:
            raise InvalidRequest("weight_dir is missing", field="weight_dir", code="missing_required_parameter")


class StartProfileRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /start_profile`, whose body may be left out. profile_prefix: begins the names of the files."""

    profile_prefix: str | None = None
    delay_iterations: Annotated[Any, _WHOLE_PROFILE] = None
    max_iterations: Annotated[Any, _WHOLE_PROFILE] = None


class SleepState(Struct, frozen=True):
    """Response of `GET /is_sleeping`, `POST /sleep` and `POST /wake_up`."""

    is_sleeping: bool


class ProfileState(Struct, frozen=True):
    """Response of `POST /start_profile` and `POST /stop_profile`."""

    is_profiling: bool


class WeightsUpdated(Struct, frozen=True):
    """Response of `POST /update_weights_from_disk`, with the fields of SGLang."""

    message: str
    success: bool = True


async def health(context: ServerContext, request: Request) -> Health:
    """Return the state of each engine core while one is ready.

    Raises EngineRestartingError, EngineDeadError or EngineUnresponsiveError.
    """
    await context.llm.check_health()
    states = [
        EngineState(each.number, each.role, each.state, bool(each.stats.num_paused), bool(each.stats.num_sleeping))
        for each in context.llm.replicas
    ]
    return Health(states)


async def ready(context: ServerContext, request: Request) -> Health:
    """Return whether requests are served: not while the model loads, while no core is ready, nor once the server stops.

    Raises as `health` does, and ApiError.
    """
    if context.open_requests.is_closing:
        raise shutting_down()
    return await health(context, request)


async def load(context: ServerContext, request: Request) -> Load:
    """Return the number of open requests."""
    return Load(len(context.open_requests))


async def tokenizer_info(context: ServerContext, request: Request) -> dict[str, Any]:
    """Return the settings of the tokenizer, with the chat template in use."""
    return context.llm.input.tokenizer_info


async def drain(context: ServerContext, request: Request) -> Drained:
    """Move the requests of a replica to others, and start it again or stop it. Raises InvalidRequest."""
    asked = await read_json(request, DrainRequest)
    return Drained(await context.llm.drain(asked.replica, stop=asked.stop))


async def version(context: ServerContext, request: Request) -> Version:
    """Return the version of octavo."""
    return Version(__version__)


async def metrics(context: ServerContext, request: Request) -> Response:
    """Return the metrics as Prometheus reads them."""
    others = [] if context.counts_of_others is None else await context.counts_of_others()
    # takes milliseconds, during which no stream would be sent
    text = await asyncio.to_thread(context.llm.metrics.render, vllm_names=context.args.vllm_metrics, others=others)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def is_paused(context: ServerContext, request: Request) -> PauseState:
    """Return whether generation is paused."""
    return PauseState(await context.llm.is_paused())


async def pause(context: ServerContext, request: Request) -> Paused:
    """Keep all requests waiting until they are resumed, or end them."""
    asked: PauseQuery = request.state.query
    await context.llm.pause_generation(mode=asked.mode, clear_cache=asked.clear_cache)
    return Paused("paused")


async def resume(context: ServerContext, request: Request) -> Paused:
    """Go on with all requests after a pause."""
    await context.llm.resume_generation()
    return Paused("resumed")


async def is_sleeping(context: ServerContext, request: Request) -> SleepState:
    """Return whether the engine has given back the memory of its weights and its KV cache."""
    return SleepState(await context.llm.is_sleeping())


async def sleep(context: ServerContext, request: Request) -> SleepState:
    """Give back the memory of weights and KV cache; requests wait. Raises ApiError or InvalidRequest."""
    asked: SleepQuery = request.state.query
    with _moving_weights(context):
        await context.llm.sleep(asked.level, asked.mode)
    return SleepState(asked.level > 0)


async def wake_up(context: ServerContext, request: Request) -> SleepState:
    """Load the weights again. Raises ApiError or InvalidRequest."""
    asked: WakeUpQuery = request.state.query
    with _moving_weights(context):
        await context.llm.wake_up(asked.tags)
    return SleepState(False)


async def update_weights(context: ServerContext, request: Request) -> WeightsUpdated:
    """Go on with the weights of another checkpoint of the same model. Raises ApiError or InvalidRequest."""
    asked = await read_json(request, UpdateWeightsRequest)
    return await _update_weights(context, asked.model_path)


async def update_from_folder(context: ServerContext, request: Request) -> WeightsUpdated:
    """Go on with the weights of the checkpoint in a directory. Raises ApiError or InvalidRequest."""
    asked = await read_json(request, WeightFolderRequest)
    assert asked.weight_dir is not None, "it was checked"
    return await _update_weights(context, asked.weight_dir)


async def _update_weights(context: ServerContext, path: str) -> WeightsUpdated:
    with _moving_weights(context):
        await context.llm.update_weights_from_disk(path)
    return WeightsUpdated(f"the weights are those of {path}")


async def start_profile(context: ServerContext, request: Request) -> ProfileState:
    """Begin to record with torch's profiler what the engine computes. Raises ApiError or InvalidRequest."""
    asked = await read_optional_json(request, StartProfileRequest)
    with _profiling(context):
        await context.llm.start_profile(asked.profile_prefix)
    return ProfileState(True)


async def stop_profile(context: ServerContext, request: Request) -> ProfileState:
    """End the profile and write it. Raises ApiError."""
    with _profiling(context):
        await context.llm.stop_profile()
    return ProfileState(False)


def _profiling(context: ServerContext) -> AbstractContextManager[None]:
    if not context.llm.config.observability.profiler_config.get("profiler"):
        raise ApiError(404, "profiles are off; start the server with --profiler-config", code="profiler_off")
    return conflicts("profile_failed")


def _moving_weights(context: ServerContext) -> AbstractContextManager[None]:
    if not context.llm.config.model.enable_sleep_mode:
        raise ApiError(
            403, "this engine keeps its weights and its memory; start the server with --enable-sleep-mode", code="awake"
        )
    return conflicts("weights_unchanged")
