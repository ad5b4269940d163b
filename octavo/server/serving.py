"""A server process from its start to its end: address, engine, signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn.server
import uvloop
from starlette.types import ASGIApp

from octavo import logging as octavo_logging
from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.replicas import Replicas, StartReplicas
from octavo.server.app import build_app
from octavo.server.connections import CLOSING_S, Connections
from octavo.server.errors import shutting_down
from octavo.server.http_protocol import HttpProtocol
from octavo.server.key_file import check_tenant_weights, read_callers
from octavo.server.keys import Callers
from octavo.server.load_log import log_load
from octavo.server.open_requests import OpenRequests
from octavo.server.sockets import bind, stop_listening, url_of

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_ENGINE_DEAD = 0, 1

_RESERVED_FILES = 64
"""Open files of a server besides its counted connections."""
_MOST_FILES = 1 << 16

_KEEP_ALIVE_S = 30
"""Clients keep idle connections for less, so that they do not write to one that is being closed."""


@dataclass
class StopSignals:
    """`first` is set by the first SIGINT or SIGTERM, `second` by the next."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)


def serve(engine_args: EngineArgs, server_args: ServerArgs, start_replicas: StartReplicas = Replicas.start) -> int:
    """Serve a model until a signal or the engine's end; returns the exit code, 0 after a signal.

    Raises ConfigError, before the model is loaded, when the keys or the address cannot be used, and what
    AsyncLLM.start_over raises.
    """
    callers = read_callers(server_args)
    check_tenant_weights(engine_args.tenant_weights, callers)
    with bind(server_args.host, server_args.port) as listener:
        octavo_logging.set_up(engine_args.log_level, role="server")
        _raise_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_start_and_serve(engine_args, server_args, callers, listener, start_replicas))


async def _start_and_serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    callers: Callers,
    listener: socket.socket,
    start_replicas: StartReplicas,
) -> int:
    from octavo.async_llm import AsyncLLM

    signals = StopSignals()
    signals.listen()
    llm = await unless_stopped(asyncio.ensure_future(AsyncLLM.start_over(engine_args, start_replicas)), signals)
    if llm is None:
        logger.info("stopped before the engine was ready")
        return EXIT_STOPPED
    try:
        return await serve_until_stopped(llm, server_args, listener, signals, callers)
    finally:
        await llm.shutdown()


async def unless_stopped(starting: asyncio.Future[AsyncLLM], signals: StopSignals) -> AsyncLLM | None:
    """Return the engine, or None when a signal came first."""
    stopped = asyncio.create_task(signals.first.wait())
    waiting: set[asyncio.Future[Any]] = {starting, stopped}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and (error := starting.exception()) is not None:
        logger.debug("the cancelled start ended with %s", error)
    return None


async def serve_until_stopped(
    llm: AsyncLLM, args: ServerArgs, listener: socket.socket, signals: StopSignals, callers: Callers | None = None
) -> int:
    """Serve requests until a signal (exit code 0) or until the engine has stopped (not 0)."""
    open_requests = OpenRequests()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server = HttpServer(build_app(llm, args, open_requests, callers=callers), args, listener)
    await server.start()
    model, names = llm.config.model, llm.config.model.served_model_names
    called = "" if names == (model.name,) else f" as {', '.join(names)}"
    print(f"octavo serves {model.name}{called} at {url_of(listener)}/v1", flush=True)
    # objects that exist now are kept: the garbage collector need not visit them again
    gc.freeze()

    is_quiet = llm.config.observability.disable_log_stats
    loads = None if is_quiet else asyncio.create_task(log_load(llm, open_requests))
    stopped = asyncio.create_task(signals.first.wait())
    dead = asyncio.create_task(llm.wait_dead())
    try:
        waiting: set[asyncio.Task[Any]] = {stopped, dead}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            logger.error("the engine has stopped: %s", dead.result())
            await server.close(open_requests, signals, grace_s=CLOSING_S)
            return EXIT_ENGINE_DEAD
        if num_open := len(open_requests):
            named = f"{num_open} open request{'' if num_open == 1 else 's'}"
            logger.info(
                "stopping: %s to finish within %g s; a second signal ends what is open now",
                named,
                args.shutdown_timeout_s,
            )
        await server.close(open_requests, signals, grace_s=args.shutdown_timeout_s)
        return EXIT_STOPPED
    finally:
        for task in (stopped, dead, loads):
            if task is not None:
                task.cancel()


def _raise_open_files() -> None:
    """Raise the number of open files, and so of connections, to what the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _http_config(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    """Return the settings of uvicorn's connections. Its server is not used: its main loop would wake ten times a
    second."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        root_path=args.root_path.rstrip("/"),
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    return config


class HttpServer:
    """Serves an application on the connections of a listener, from `start` to `close`."""

    def __init__(self, app: ASGIApp, args: ServerArgs, listener: socket.socket) -> None:
        self._config = _http_config(app, args)
        self._listener = listener
        self._state = uvicorn.server.ServerState()
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections = Connections(args, max(1, most_files - _RESERVED_FILES))

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpProtocol(self._config, self._state, self._connections, loop),
            sock=self._listener,
            backlog=self._config.backlog,
        )

    async def close(self, open_requests: OpenRequests, signals: StopSignals, *, grace_s: float) -> None:
        """Accept nothing more, let open requests finish within `grace_s` or until a second signal, end the rest."""
        connections = self._connections
        connections.is_draining = open_requests.is_closing = True
        await stop_listening(self._server, self._listener)
        connections.finish_all()
        closing = asyncio.create_task(self._wait_closed())
        second = asyncio.create_task(signals.second.wait())
        await asyncio.wait({closing, second}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        if not closing.done():
            open_requests.end_all(shutting_down())
            await asyncio.wait({closing}, timeout=CLOSING_S)
        if not closing.done():
            # clients that do not read their response, or have not sent all of their request
            connections.abort_all()
            await asyncio.wait({closing}, timeout=CLOSING_S)
        if closing.done():
            closing.result()
        else:
            closing.cancel()
            print("octavo: some connections could not be closed", file=sys.stderr)

    async def _wait_closed(self) -> None:
        await self._connections.wait_closed()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks)
