"""Runs a server process: its address, its engine and its signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn.server
import uvloop

from octavo import logging as octavo_logging
from octavo.config.args import EngineArgs
from octavo.config.schema import EngineConfig
from octavo.config.server_args import ServerArgs
from octavo.core.messages import SchedulerStats
from octavo.engine.cores.replicas import Replicas, StartReplicas
from octavo.errors import ConfigError, OctavoError
from octavo.server.app import App, loading_app
from octavo.server.errors import shutting_down
from octavo.server.http.connections import CLOSING_S, MOST_UNCOUNTED, Connections
from octavo.server.http.encryption import Encrypted
from octavo.server.http.http_protocol import HttpProtocol
from octavo.server.http.sockets import listening, load_certificate, stop_listening, tls_context, url_of
from octavo.server.key_file import check_tenant_weights, read_callers
from octavo.server.sending import OpenRequests

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_ENGINE_DEAD = 0, 1

_RESERVED_FILES = 64
"""Open files of a server besides its counted connections."""
_MOST_FILES = 1 << 16

_MOST_ACCEPTED = 64
"""Most connections accepted in one turn of the event loop, besides the one that uvloop accepts."""
_BACKLOG = 4096
"""Connections that the system queues until they are accepted; when it is full, clients try again after seconds."""

_OBJECTS_UNTIL_COLLECTION = 50_000
"""New objects between two searches of the garbage collector for cycles, of which there are few."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that a server handles."""

_LOG_INTERVAL_S = 5.0
"""Seconds between two logs of the load while there are requests."""

_KEEP_ALIVE_S = 30
"""Seconds for which an idle connection is kept: longer than clients do, so that they do not write to one being
closed."""


@dataclass
class StopSignals:
    """`first` is set by the first SIGINT or SIGTERM, `second` by the next."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def listen(self, on_hangup: Callable[[], object]) -> None:
        """Handle the signals of this process from now on. on_hangup: what SIGHUP calls on the event loop."""
        for number, act in ((signal.SIGINT, self.stop), (signal.SIGTERM, self.stop), (signal.SIGHUP, on_hangup)):
            asyncio.get_running_loop().add_signal_handler(number, act)


def serve(engine_args: EngineArgs, server_args: ServerArgs, start_replicas: StartReplicas = Replicas.start) -> int:
    """Serve a model until a signal or the engine's end; returns the exit code, 0 after a signal.

    Raises ConfigError, before the model is loaded, when the keys or the address cannot be used, and what
    AsyncLLM.start_over raises.
    """
    callers = read_callers(server_args)
    check_tenant_weights(engine_args.tenant_weights, callers)
    tls_context(server_args)
    with listening(server_args) as listener:
        octavo_logging.set_up(engine_args.log_level, role="server")
        if server_args.api_server_count > 1:
            from octavo.server.api_servers import ApiServers

            return ApiServers(engine_args, server_args, listener).run(start_replicas)
        return serve_on(listener, engine_args, loading_app(server_args, callers), start_replicas)


def serve_on(
    listener: socket.socket,
    engine_args: EngineArgs,
    app: App,
    start_replicas: StartReplicas,
    *,
    is_early: bool = True,
) -> int:
    """Serve an application on a socket until a signal or the engine's end; returns the exit code. is_early: connections
    are accepted while the model loads, and requests are refused with 503; otherwise once requests can be served.
    """
    _raise_open_files()
    server = HttpServer(app, listener, tls_context(app.context.args))
    return run_to_exit_code(_start_and_serve(engine_args, server, start_replicas, is_early=is_early))


def run_to_exit_code(main: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine that handles signals on an event loop of its own, and return its exit code.

    The previous handlers are restored: a loop of uvloop leaves its own behind, which would ignore Ctrl-C and SIGTERM.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


async def _start_and_serve(
    engine_args: EngineArgs, server: HttpServer, start_replicas: StartReplicas, *, is_early: bool
) -> int:
    from octavo.async_llm import AsyncLLM

    async def start(config: EngineConfig) -> Replicas:
        return await start_replicas(server.context.load(config))

    signals = StopSignals()
    signals.listen(server.reload)
    if is_early:
        await server.start()
    try:
        llm = await unless_stopped(asyncio.ensure_future(AsyncLLM.start_over(engine_args, start)), signals)
    except BaseException:
        await server.close(signals, grace_s=0)
        raise
    if llm is None:
        logger.info("stopped before the engine was ready")
        await server.close(signals, grace_s=0)
        return EXIT_STOPPED
    try:
        return await serve_until_stopped(llm, server, signals)
    finally:
        await llm.shutdown()


@asynccontextmanager
async def app_in_process(args: EngineArgs) -> AsyncIterator[App]:
    """Yield the application with an engine of its own, for requests that are made without a connection."""
    from octavo.async_llm import AsyncLLM

    llm = await AsyncLLM.start(args)
    try:
        app = loading_app(ServerArgs())
        await app.context.serve(llm)
        yield app
    finally:
        await llm.shutdown()


async def unless_stopped(starting: asyncio.Future[AsyncLLM], signals: StopSignals) -> AsyncLLM | None:
    """Return the engine, or None if a signal came before it was ready."""
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


async def serve_until_stopped(llm: AsyncLLM, server: HttpServer, signals: StopSignals) -> int:
    """Serve requests until a signal (exit code 0) or until the engine has stopped (not 0)."""
    await server.context.serve(llm)
    if not server.is_started:
        await server.start()
    args, open_requests = server.context.args, server.context.open_requests
    model, names = llm.config.model, llm.config.model.served_model_names
    called = "" if names == (model.name,) else f" as {', '.join(names)}"
    if server.context.is_first:
        print(f"octavo serves {model.name}{called} at {server.addresses}", flush=True)
    # objects that exist now are kept: the garbage collector need not visit them again; nor those of open streams every
    # few tokens, which took a tenth of the processor time
    gc.freeze()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION, 20, 50)

    is_quiet = llm.config.observability.disable_log_stats or not server.context.is_first
    loads = None if is_quiet else asyncio.create_task(log_load(llm, open_requests))
    stopped = asyncio.create_task(signals.first.wait())
    dead = asyncio.create_task(llm.wait_dead())
    resuming: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            logger.error("the engine has stopped: %s", dead.result())
            await server.close(signals, grace_s=CLOSING_S)
            return EXIT_ENGINE_DEAD
        if num_open := len(open_requests):
            named = f"{num_open} open request{'' if num_open == 1 else 's'}"
            logger.info(
                "stopping: %s to finish within %g s; a second signal ends what is open now",
                named,
                args.shutdown_timeout_s,
            )
            resuming = asyncio.create_task(_end_pause(llm))
        await server.close(signals, grace_s=args.shutdown_timeout_s)
        return EXIT_STOPPED
    finally:
        for task in (stopped, dead, loads, resuming):
            if task is not None:
                task.cancel()
        if (tracer := server.context.tracer) is not None:
            await asyncio.to_thread(tracer.close)


async def _end_pause(llm: AsyncLLM) -> None:
    """Resume a paused engine, which would not finish the open requests."""
    try:
        await llm.resume_generation()
    except OctavoError as error:
        logger.warning("a pause could not be ended: %s", error)


async def log_load(llm: AsyncLLM, open_requests: OpenRequests, interval_s: float = _LOG_INTERVAL_S) -> None:
    """Log the load until cancelled. Waits without a timer while no request is open."""
    while True:
        await open_requests.started.wait()
        before, measured_at = llm.stats, time.monotonic()
        while open_requests:
            await asyncio.sleep(interval_s)
            after, now = llm.stats, time.monotonic()
            if after.num_steps != before.num_steps or open_requests:
                logger.info("%s", describe_load(before, after, now - measured_at))
            before, measured_at = after, now


def describe_load(before: SchedulerStats, after: SchedulerStats, seconds: float) -> str:
    prompt_rate = (after.num_prompt_tokens - before.num_prompt_tokens) / seconds
    generated_rate = (after.num_generated_tokens - before.num_generated_tokens) / seconds
    queried = after.num_queried_tokens - before.num_queried_tokens
    fetched = after.num_fetched_tokens - before.num_fetched_tokens
    hits = f", {(after.num_cached_tokens - before.num_cached_tokens) / queried:.0%} prefix hits" if queried else ""
    hits += f", {fetched / queried:.0%} fetched" if queried and fetched else ""
    return (
        f"{after.num_running} running, {after.num_waiting} waiting, {after.num_swapped} swapped; "
        f"KV {after.kv_cache_usage:.1%}; {prompt_rate:,.1f} prompt and {generated_rate:,.1f} generated tokens/s{hits}"
    )


def _raise_open_files() -> None:
    """Raise the number of open files, and so of connections, to what the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer:
    """Serves an application on the connections of a listener, from `start` to `close`. tls: None for plain HTTP."""

    def __init__(self, app: App, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._app, self.context = app, app.context
        self._args = args = app.context.args
        # uvicorn's connections without its server, whose main loop would wake ten times a second
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            root_path=args.root_path.rstrip("/"),
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        self._config.load()
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._tls = tls
        self._accepting: set[asyncio.Task[Any]] = set()
        self._state = uvicorn.server.ServerState()
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections = Connections(args, max(1, most_files - _RESERVED_FILES - MOST_UNCOUNTED))

    @property
    def is_started(self) -> bool:
        """Return whether `start` was called."""
        return self._server is not None

    async def start(self) -> None:
        """Accept connections. Raises ConfigError."""
        loop = asyncio.get_running_loop()

        def make_connection() -> asyncio.Protocol:
            connection = HttpProtocol(self._config, self._state, self._connections, loop)
            return connection if self._tls is None else Encrypted(connection, self._connections, self._tls)

        def connect() -> asyncio.Protocol:
            self._accept_more(loop, make_connection)
            return make_connection()

        backlog = self._config.backlog
        if self._listener.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(connect, sock=self._listener, backlog=backlog)
            return
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._server = await loop.create_server(connect, sock=self._listener, backlog=backlog)

    def _accept_more(self, loop: asyncio.AbstractEventLoop, make_connection: Callable[[], asyncio.Protocol]) -> None:
        """Accept further connections: uvloop accepts one per turn of the event loop, and with hundreds of open streams
        turns are so slow that a health check would wait behind thousands of connections. Connections beyond the limit
        are left to uvloop: each is refused and closed before the next takes a file descriptor."""
        for _ in range(min(_MOST_ACCEPTED, self._connections.num_free - len(self._accepting))):
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # no further connection, or no file descriptor: then the event loop closes the next one
            client.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(make_connection, client))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

    def reload(self) -> None:
        """Read API keys and the certificate again; what cannot be read stays as it is, and the reason is logged."""
        self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        await self._app.keys.reload()
        if self._tls is not None:
            try:
                await asyncio.to_thread(tls_context, self._args)  # a wrong pair would break the context in use
                await asyncio.to_thread(load_certificate, self._tls, self._args)
                logger.info("new connections get the certificate of %s", self._args.ssl_certfile)
            except ConfigError as error:
                logger.error("the certificate stays as it is: %s", error)

    @property
    def addresses(self) -> str:
        """Return the base URL of the API and a line with that of the page; for a Unix socket only its path."""
        address = url_of(self._listener, "http" if self._tls is None else "https")
        return address if self._args.uds else f"{address}/v1\nto try it in a browser, open {address}/"

    async def close(self, signals: StopSignals, *, grace_s: float) -> None:
        """Stop accepting, let open requests finish for `grace_s` seconds or until a second signal, and end the
        others."""
        connections, open_requests = self._connections, self.context.open_requests
        connections.is_draining = open_requests.is_closing = True
        if self._server is not None:
            await stop_listening(self._server, self._listener)
        if self._accepting:
            await asyncio.wait(self._accepting)
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
