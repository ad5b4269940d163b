"""`octavo serve [MODEL]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.cli.options import Given, with_options
from octavo.cli.start import mention_demonstration_model
from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig
    from octavo.engine.cores.replicas import Replicas


def serving(ahead: SpawnedCore | None = None) -> Callable[..., int]:
    """Return the command. ahead: the process of its core if it was started before, else None."""

    @with_options(ServerArgs, EngineArgs, model="positional")
    def serve(*, given: Given) -> int:
        """Serve a model over HTTP, as the OpenAI API does, or one engine of it for `octavo proxy` (--role)."""
        engine_args, server_args = given.arguments(EngineArgs), given.arguments(ServerArgs)
        if engine_args.role is not None:
            if ahead is not None:
                ahead.discard()
            return _serve_role(engine_args, server_args, given)
        with ahead or SpawnedCore() as core:  # it imports while we do
            from octavo.engine.cores.replicas import Replicas
            from octavo.server.serving import serve as serve_http

            async def start(config: EngineConfig) -> Replicas:
                mention_demonstration_model(engine_args)  # the address is the server's
                return await Replicas.start(config, core=core)

            return serve_http(engine_args, server_args, start)

    return serve


def _serve_role(engine_args: EngineArgs, server_args: ServerArgs, given: Given) -> int:
    from octavo.cli.serve_role import serve_role

    mention_demonstration_model(engine_args)
    of_http = [name for name in given.values_of(ServerArgs) if name not in ("host", "port")]
    if of_http:
        raise ConfigError(
            f"{of_http[0]} is set, but role is {engine_args.role}: an engine with a role speaks no HTTP; give it to "
            "`octavo proxy`"
        )
    return serve_role(engine_args, server_args.host, server_args.port)


serve = serving()
