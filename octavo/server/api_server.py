"""One API server of several, in a process of its own: `python -m octavo.server.api_server FD`."""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn, cast

from octavo import logging as octavo_logging
from octavo.config.schema import EngineConfig
from octavo.core import frames
from octavo.engine.hub_client import HubClient
from octavo.engine.replicas import Replicas
from octavo.errors import OctavoError
from octavo.server.api_servers import Setup
from octavo.server.app import loading_app
from octavo.server.serving import serve_on
from octavo.server.sockets import bind


def main() -> int:
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
        client.counts = lambda: app.context.llm.metrics.counts()
        app.context.counts_of_others = client.counts_of_others
        return cast("Replicas", client)

    app.context.is_first = setup.number == 0
    with (
        bind(args.host, args.port, is_shared=True)
        if setup.listener is None
        else socket.socket(fileno=setup.listener) as listener
    ):
        return serve_on(listener, setup.engine_args, app, start)


def run() -> NoReturn:
    """Run `main` and end the process."""
    try:
        code = main()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
