"""Starts, supervises and ends the processes of several API servers in front of the same engine cores.

The first process is the hub between them and the cores (`octavo.engine.cores.hub`) and speaks no HTTP. A server that
dies is started again; its requests end. Each server runs `python -m octavo.server.api_servers FD`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, cast

import msgspec

from octavo import logging as octavo_logging
from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.config.schema import EngineConfig
from octavo.config.server_args import ServerArgs
from octavo.core.process import frames, processes
from octavo.engine.cores.hub import Hub
from octavo.engine.cores.hub_client import HubClient
from octavo.engine.cores.replicas import Replicas, StartReplicas
from octavo.errors import EngineDeadError, OctavoError
from octavo.server.app import loading_app
from octavo.server.http.connections import CLOSING_S
from octavo.server.http.sockets import bind
from octavo.server.routes.control import abort_own, own_counts
from octavo.server.serving import EXIT_ENGINE_DEAD, EXIT_STOPPED, run_to_exit_code, serve_on

BACK_OFF_S: Final = 1.0
"""Seconds before a server that died within `SOON_S` of its start is started again; doubled each time."""
MOST_BACK_OFF_S: Final = 30.0
SOON_S: Final = 60.0

LOOK_S: Final = 5.0
"""Seconds between two checks of a server; one that a signal has stopped is killed at the second check."""


_log = logging.getLogger(__name__)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server is started with.

    listener: the descriptor of a Unix socket that it accepts connections of; None for one that binds the address of
    `server_args` itself.
    is_early: whether it accepts connections before it can serve requests, so that clients learn that the model loads.
    Only the first server does that: connections that others would refuse could be served by those that are ready.
    """

    number: int
    engine_args: EngineArgs
    server_args: ServerArgs
    listener: int | None
    is_early: bool


class ApiServers:
    """Runs as many API servers as `server_args.api_server_count` says. listener: holds their address."""

    def __init__(self, engine_args: EngineArgs, server_args: ServerArgs, listener: socket.socket) -> None:
        self._engine_args = engine_args
        self._listener = listener
        if listener.family != socket.AF_UNIX:
            server_args = replace(server_args, port=listener.getsockname()[1])
        self._server_args = server_args
        self._processes: dict[int, processes.Process] = {}
        self._is_stopping = False
        self._is_served = False
        self._stopped: asyncio.Future[int]

    def run(self, start_replicas: StartReplicas) -> int:
        """Serve until a signal or the end of the cores; returns the exit code, 0 after a signal."""
        return run_to_exit_code(self._run(start_replicas))

    async def _run(self, start_replicas: StartReplicas) -> int:
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        hub: asyncio.Future[Hub] = loop.create_future()
        servers = [asyncio.create_task(self._keep(number, hub)) for number in range(self._server_args.api_server_count)]
        serving = asyncio.create_task(self._serve_cores(start_replicas, hub))
        try:
            waiting: set[asyncio.Future[Any]] = {self._stopped, serving, *servers}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                return self._stopped.result()
            for each in done:
                each.result()  # an exception from the start of the cores or of a server is raised here
            return EXIT_ENGINE_DEAD
        finally:
            self._is_stopping = True
            self._pass_on(signal.SIGTERM)
            grace_s = self._server_args.shutdown_timeout_s + 3 * CLOSING_S
            await asyncio.gather(
                *(asyncio.to_thread(processes.end, each, grace_s) for each in self._processes.values())
            )
            for task in (*servers, serving):
                task.cancel()
            await asyncio.gather(*servers, serving, return_exceptions=True)

    async def _serve_cores(self, start_replicas: StartReplicas, hub: asyncio.Future[Hub]) -> None:
        config = await asyncio.to_thread(configure, self._engine_args)
        replicas = await start_replicas(config)
        try:
            serving = Hub(replicas)
            hub.set_result(serving)
            await serving.run()
        except EngineDeadError as error:
            _log.error("the engine has stopped: %s", error)
        finally:
            await replicas.shutdown()

    async def _keep(self, number: int, hub: asyncio.Future[Hub]) -> None:
        """Run a server, and another one whenever it dies."""
        back_off_s = BACK_OFF_S
        while not self._is_stopping:
            started_at = time.monotonic()
            try:
                connection, process = self._spawn(number)
            except OSError as error:  # memory or processes are short, perhaps for a moment: the others go on
                if not self._is_served:
                    raise
                _log.error("API server %d cannot be started: %s; trying again in %g s", number, error, back_off_s)
                await asyncio.sleep(back_off_s)
                back_off_s = min(MOST_BACK_OFF_S, 2 * back_off_s)
                continue
            reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
            try:
                ended = asyncio.create_task(asyncio.to_thread(process.wait))
                waiting: set[asyncio.Future[Any]] = {ended, hub}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if hub.done() and not ended.done():
                    self._is_served = True
                    watching = asyncio.create_task(kill_if_stopped(process))
                    await hub.result().serve(reader, writer)
                    watching.cancel()
                code = await ended
            finally:
                writer.close()
            if self._is_stopping:
                return
            if not self._is_served or code == 0:
                # the server has logged why it cannot serve, or a signal to that process ended it
                self._finish(code)
                return
            if time.monotonic() - started_at > SOON_S:
                back_off_s = BACK_OFF_S
            _log.error("API server %d has ended (exit code %d); starting it again in %g s", number, code, back_off_s)
            await asyncio.sleep(back_off_s)
            back_off_s = min(MOST_BACK_OFF_S, 2 * back_off_s)

    def _spawn(self, number: int) -> tuple[socket.socket, processes.Process]:
        is_path = self._listener.family == socket.AF_UNIX
        descriptors = [self._listener.fileno()] if is_path else []
        connection, process = processes.spawn("octavo.server.api_servers", pass_fds=descriptors)
        self._processes[number] = process
        setup = Setup(
            number=number,
            engine_args=self._engine_args,
            server_args=self._server_args,
            listener=descriptors[0] if is_path else None,
            is_early=number == 0 and not self._is_served,
        )
        connection.sendall(frames.pack(setup))
        return connection, process

    def _stop(self) -> None:
        if self._is_stopping:
            self._pass_on(signal.SIGTERM)  # the second signal ends what is open
        self._finish(EXIT_STOPPED)

    def _finish(self, code: int) -> None:
        if not self._stopped.done():
            self._stopped.set_result(code)

    def _pass_on(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)


async def kill_if_stopped(process: processes.Process) -> None:
    """Kill a process that a signal or a debugger has stopped: its share of the connections would wait for it."""
    was_stopped = False
    while True:
        await asyncio.sleep(LOOK_S)
        state = processes.ProcessState.of(process.pid)
        is_stopped = state is not None and state.is_stopped
        if is_stopped and was_stopped:
            _log.error("API server process %d is stopped; it is killed", process.pid)
            process.kill()
            return
        was_stopped = is_stopped


def serve_one() -> int:
    """Serve until a signal or the end of the hub; returns the exit code."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    setup = frames.read_as(connection, Setup)
    if setup is None:
        return 0
    args = setup.server_args
    octavo_logging.set_up(setup.engine_args.log_level, role=f"server{setup.number}")
    app = loading_app(args)

    async def start(config: EngineConfig) -> Replicas:
        client = await HubClient.connect(connection)
        client.counts = partial(own_counts, app.context)
        client.abort = partial(abort_own, app.context)
        app.context.counts_of_others, app.context.abort_at_others = client.counts_of_others, client.abort_at_others
        return cast("Replicas", client)

    app.context.is_first = setup.number == 0
    with (
        bind(args.host, args.port, is_shared=True)
        if setup.listener is None
        else socket.socket(fileno=setup.listener) as listener
    ):
        return serve_on(listener, setup.engine_args, app, start, is_early=setup.is_early)


def run() -> NoReturn:
    """Be one API server, in this process."""
    try:
        code = serve_one()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        code = 1
    processes.end_now(code)


if __name__ == "__main__":
    run()
