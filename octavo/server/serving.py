"""The life of a server process: address, engine, signals, end."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from octavo import logging as octavo_logging
from octavo.config.args import EngineArgs, ServerArgs
from octavo.errors import ConfigError
from octavo.server.errors import shutting_down
from octavo.server.load_log import log_load
from octavo.server.open_requests import OpenRequests

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_ENGINE_DEAD = 0, 1

_LAST_WORDS_S = 2.0
"""Time for answers that tell of an end to reach clients that read."""

_KEEP_ALIVE_S = 30
"""Longer than clients keep idle connections, so that they do not write to one that is just being closed."""

BuildApp = Callable[["AsyncLLM", ServerArgs, OpenRequests], ASGIApp]


@dataclass
class StopSignals:
    """`asked` is set by the first SIGINT or SIGTERM, `insisted` by the next."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    insisted: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)


def run(engine_args: EngineArgs, server_args: ServerArgs, build_app: BuildApp) -> int:
    """Bind, load, serve, end. Returns the exit code; raises ConfigError before anything is loaded."""
    with bind(server_args.host, server_args.port) as listener:
        octavo_logging.set_up(engine_args.log_level, role="server")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_start_and_serve(engine_args, server_args, build_app, listener))


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address, so that nobody else gets it while the model loads. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} is not an address of this machine ({error}); give one, such as 127.0.0.1"
        ) from error
    # a name such as localhost may have an address of each family; clients try the older one in any case
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # without this, others could still bind the port until we listen, which we do when the model is loaded
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {_bind_problem(error)}") from error
    listener.setblocking(False)
    return listener


def _bind_problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program uses this port; choose another with --port, or --port 0 for a free one"
    if error.errno == errno.EACCES:
        return "ports below 1024 need more rights; choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine does not have that address; choose another with --host"
    return os.strerror(error.errno or 0)


def url_of(listener: socket.socket) -> str:
    """The address for people to click on."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _start_and_serve(
    engine_args: EngineArgs, server_args: ServerArgs, build_app: BuildApp, listener: socket.socket
) -> int:
    from octavo.async_llm import AsyncLLM

    signals = StopSignals()
    signals.listen()
    llm = await unless_stopped(asyncio.ensure_future(AsyncLLM.start(engine_args)), signals)
    if llm is None:
        logger.info("stopped before the engine was ready")
        return EXIT_STOPPED
    try:
        return await serve_until_stopped(llm, server_args, build_app, listener, signals)
    finally:
        await llm.shutdown()


async def unless_stopped(starting: asyncio.Future[AsyncLLM], signals: StopSignals) -> AsyncLLM | None:
    """The engine, or None when a signal came first."""
    asked = asyncio.create_task(signals.asked.wait())
    waiting: set[asyncio.Future[Any]] = {starting, asked}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and (error := starting.exception()) is not None:
        logger.debug("the start that was given up ended with %s", error)
    return None


async def serve_until_stopped(
    llm: AsyncLLM, args: ServerArgs, build_app: BuildApp, listener: socket.socket, signals: StopSignals
) -> int:
    """Answer requests until a signal (exit code 0) or until the engine has stopped (not 0)."""
    open_requests = OpenRequests()
    server = _http_server(build_app(llm, args, open_requests), args)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    await server.startup(sockets=[listener])
    model, names = llm.config.model, llm.config.model.served_model_names
    called = "" if names == (model.name,) else f" as {', '.join(names)}"
    print(f"octavo serves {model.name}{called} at {url_of(listener)}/v1", flush=True)
    # what is alive now stays: collecting garbage need not look at it again
    gc.freeze()

    loads = asyncio.create_task(log_load(llm, open_requests)) if llm.config.observability.log_stats else None
    asked = asyncio.create_task(signals.asked.wait())
    dead = asyncio.create_task(llm.wait_dead())
    try:
        waiting: set[asyncio.Task[Any]] = {asked, dead}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            logger.error("the engine has stopped: %s", dead.result())
            await _close(server, listener, open_requests, signals, grace_s=_LAST_WORDS_S)
            return EXIT_ENGINE_DEAD
        if open_requests:
            logger.info(
                "stopping: %d open request%s to finish within %g s; a second signal ends what is open now",
                len(open_requests),
                "" if len(open_requests) == 1 else "s",
                args.shutdown_timeout_s,
            )
        await _close(server, listener, open_requests, signals, grace_s=args.shutdown_timeout_s)
        return EXIT_STOPPED
    finally:
        for task in (asked, dead, loads):
            if task is not None:
                task.cancel()


def _http_server(app: ASGIApp, args: ServerArgs) -> uvicorn.Server:
    """uvicorn's connections without its main loop, which would wake ten times a second."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        # of what clients send that is not HTTP, a line for each would let them fill the log
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        root_path=args.root_path.rstrip("/"),
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


async def _close(
    server: uvicorn.Server,
    listener: socket.socket,
    open_requests: OpenRequests,
    signals: StopSignals,
    *,
    grace_s: float,
) -> None:
    """Accept nothing more, let open requests finish within the grace time or until a second signal, end the rest."""
    closing = asyncio.create_task(server.shutdown(sockets=[listener]))
    insisted = asyncio.create_task(signals.insisted.wait())
    await asyncio.wait({closing, insisted}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    insisted.cancel()
    if not closing.done():
        open_requests.end_all(shutting_down())
        await asyncio.wait({closing}, timeout=_LAST_WORDS_S)
    if not closing.done():
        # clients that do not read their answer, or have not sent all of their request
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.wait({closing}, timeout=_LAST_WORDS_S)
    if closing.done():
        closing.result()
    else:
        closing.cancel()
        print("octavo: some connections could not be closed", file=sys.stderr)
