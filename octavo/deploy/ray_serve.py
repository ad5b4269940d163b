"""octavo as an application of Ray Serve: replicas on the machines of a Ray cluster, behind Serve's HTTP proxies.

Each replica is an engine with the server's ASGI application; the proxies send its responses on as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.config.fields import arguments, from_text
from octavo.config.server_args import ServerArgs
from octavo.config.sources import gather, known_arguments
from octavo.core.absent import remark
from octavo.errors import ConfigError, EngineRestartingError
from octavo.server import app

try:
    from ray import serve
except ImportError as error:
    raise ConfigError("Ray Serve is not installed; pip install 'octavo[ray]'") from error

_OF_THE_PROXIES: Final = (
    "host",
    "port",
    "max_header_size",
    "header_timeout_s",
    "body_timeout_s",
    "max_connections_per_address",
    "trusted_proxies",
)
"""Arguments of the HTTP server that Serve's proxies replace; they are set by `http_options`."""


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application that `serve run octavo.deploy.ray_serve:build_app model=NAME` runs.

    args: arguments of the engine and the server by name, as values or as texts, and `deployment`: options of
    `serve.deployment`, such as num_replicas, autoscaling_config and ray_actor_options. A replica accepts max_num_seqs
    requests at once for each of its engines and takes `threads` processors for each rank, unless `deployment` states
    something else. Raises ConfigError.
    """
    given = {name: _value(name, value) for name, value in args.items() if name != "deployment"}
    engine_args = gather(EngineArgs, {name: given[name] for name in given.keys() & arguments(EngineArgs).keys()})
    of_server = {name: given[name] for name in given.keys() & arguments(ServerArgs).keys()}
    server_args = gather(ServerArgs, of_server | {"host": "0.0.0.0"})
    num_ranks = engine_args.tensor_parallel_size * engine_args.pipeline_parallel_size * engine_args.num_engines
    options = {
        "name": "octavo",
        "max_ongoing_requests": engine_args.max_num_seqs * engine_args.num_engines,
        "graceful_shutdown_timeout_s": server_args.shutdown_timeout_s,
        "ray_actor_options": {"num_cpus": num_ranks * (engine_args.threads or 1)},
    }
    options |= args.get("deployment", {})
    return serve.deployment(**options)(Replica).bind(engine_args, server_args)


def _value(name: str, value: Any) -> Any:
    known = known_arguments()
    if name in _OF_THE_PROXIES:
        raise ConfigError(f"{name} has no effect under Ray Serve, whose proxies have the connections; leave it out")
    if name not in known:
        raise ConfigError(f"{name} is not an argument{remark(name, known)}")
    return from_text(known[name], value, name) if isinstance(value, str) else value


@serve.ingress()
class Replica:
    """An engine and the application that serves it, in one actor."""

    async def __init__(self, engine_args: EngineArgs, server_args: ServerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        self._llm = await AsyncLLM.start(engine_args)
        self._app = app.loading_app(server_args)
        await self._app.context.serve(self._llm)

    def __serve_build_asgi_app__(self) -> app.App:
        return self._app

    async def check_health(self) -> None:
        """Raise when the engine has died or hangs; Serve then replaces the replica, but not while its core restarts."""
        with suppress(EngineRestartingError):
            await self._llm.check_health()

    async def __del__(self) -> None:
        await self._llm.shutdown()
