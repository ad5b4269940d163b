"""`octavo serve [MODEL]`."""

from __future__ import annotations

from functools import partial

from octavo.cli.options import Given, with_options
from octavo.cli.start import mention_demonstration_model
from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.engine.core_spawn import SpawnedCore


@with_options(ServerArgs, EngineArgs, model="positional")
def serve(*, given: Given) -> int:
    """Serve a model over HTTP, as the OpenAI API does, or one engine of it for `octavo proxy` (--role)."""
    engine_args, server_args = given.arguments(EngineArgs), given.arguments(ServerArgs)
    mention_demonstration_model(engine_args)
    if engine_args.role is not None:
        from octavo.cli.serve_role import serve_role

        return serve_role(engine_args, server_args.host, server_args.port)

    with SpawnedCore() as core:  # it imports while we do
        from octavo.engine.replicas import Replicas
        from octavo.server.serving import serve as serve_http

        return serve_http(engine_args, server_args, partial(Replicas.start, core=core))
