"""`octavo rank`: the ranks of this machine, for an engine that another machine serves."""

from __future__ import annotations

from octavo.cli.options import Given, with_options
from octavo.config.device_args import RankArgs
from octavo.logging import set_up


@with_options(RankArgs)
def rank(*, given: Given) -> None:
    """Compute on this machine for an engine that another one serves with --nnodes; join it again when it has died."""
    from octavo.config import hub
    from octavo.core.process.authentication import read_secret
    from octavo.executor.ranks import serve_node

    set_up(role="node")
    args = given.arguments(RankArgs)
    secret = read_secret(args.cluster_secret_file)
    path = None if args.rank_model is None else str(hub.locate(args.rank_model))
    while serve_node(
        args.master_addr,
        args.master_port,
        secret,
        node=args.node_rank,
        timeout_s=args.distributed_timeout_seconds,
        model_path=path,
    ):
        continue
