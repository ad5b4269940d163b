"""Code that `octavo serve --role` and `octavo proxy` share: the secret, and the hello of each end of a link."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from octavo import __version__
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.schema import ModelConfig
from octavo.config.sources import user_directory
from octavo.core.process.authentication import private_secret
from octavo.engine.cores.core_link import LinkHello
from octavo.errors import ConfigError
from octavo.server.http.sockets import is_loopback
from octavo.worker.start.identity import model_digest


def with_secret(args: EngineArgs, hosts: Iterable[str]) -> EngineArgs:
    """Return the arguments with a `cluster_secret_file`: where none is given and all hosts are this machine, one that
    this user's processes share. Raises ConfigError where none is given otherwise."""
    if args.cluster_secret_file is not None:
        return args
    elsewhere = next((host for host in hosts if not is_loopback(host)), None)
    directory = user_directory("cache")
    if elsewhere is not None or directory is None:
        because = "the user has no home" if elsewhere is None else f"{elsewhere} is not on this machine alone"
        raise ConfigError(
            f"cluster_secret_file is not set, and {because}; give the engines and `octavo proxy` the same secret"
        )
    return dataclasses.replace(args, cluster_secret_file=str(private_secret(directory)))


def hello_of(model: ModelConfig, role: str | None = None) -> LinkHello:
    """Return the `LinkHello` of a front, or of a core with a role."""
    digest = model_digest(Checkpoint.of(model), with_weights=False)
    return LinkHello(octavo=__version__, model=model.served_model_names[0], config=digest, role=role)
