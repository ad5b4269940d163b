"""`octavo serve MODEL --role prefill|decode`: one engine, without HTTP, for `octavo proxy`."""

from __future__ import annotations

import dataclasses
import logging
import signal
import socket
from functools import partial

from octavo.cli.link import hello_of, with_secret
from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.core.process.authentication import read_secret
from octavo.engine.cores.core_link import CoreAddress, CoreLink
from octavo.engine.cores.core_process import Inbox, build_and_serve, build_core, collect_rarely
from octavo.engine.engine_core import EngineCore
from octavo.logging import set_up
from octavo.server.http.sockets import bind, is_loopback

_log = logging.getLogger(__name__)


def serve_role(args: EngineArgs, host: str, port: int) -> int:
    """Serve an engine at an address until SIGTERM or Ctrl-C; return the exit code, 0 after a signal.

    Raises ConfigError, before the model is loaded, for an address that cannot be used or without a secret.
    """
    assert args.role is not None, "a server without a role speaks HTTP"
    set_up(args.log_level, role=args.role)
    args = with_secret(args, [host])
    if is_loopback(args.kv_host) and not is_loopback(host):
        args = dataclasses.replace(args, kv_host=host)
    with bind(host, port) as listener:
        listener.setblocking(True)
        config = configure(args)
        link = CoreLink(read_secret(args.cluster_secret_file), hello_of(config.model, args.role))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, link.stop)

        def serve(core: EngineCore, inbox: Inbox) -> None:
            collect_rarely()
            _log.info("%s", core.ready.plan)
            # accepted connections inherit it: the port can then be used again as soon as the process has ended
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen()
            _announce(args, listener)
            (identity, *_) = core.executor.call("identity")
            link.serve(core, inbox, listener, identity)

        return build_and_serve(partial(build_core, config), serve, link.report)


def _announce(args: EngineArgs, listener: socket.socket) -> None:
    """Write the address of the engine, and the command with which a proxy connects to it."""
    host, port, *_ = listener.getsockname()
    print(f"octavo serves {args.model} to fronts at {CoreAddress(host, port)} (role {args.role})", flush=True)
    reached = "<this machine>" if host in ("0.0.0.0", "::") else host
    _log.info("`octavo proxy %s --%s %s` connects to it", args.model, args.role, CoreAddress(reached, port))
