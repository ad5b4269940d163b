"""The section of prefill and decode apart, and what it needs of other arguments."""

from __future__ import annotations

import dataclasses

from octavo.config.args import EngineArgs
from octavo.config.schema import TransferConfig
from octavo.config.transfer_args import TransferArgs
from octavo.errors import ConfigError


def transfer_config(args: EngineArgs) -> TransferConfig:
    """Return the section. Raises ConfigError where its arguments contradict each other, or others."""
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        if getattr(args, name) and not getattr(args, other):
            raise ConfigError(
                f"{name} is {getattr(args, name)}, but {other} is 0: a prompt that one engine computes is decoded by "
                f"another one; give at least one of each, or leave out {name} and use data_parallel_size"
            )
    for name in ("prefill", "role", "kv_disk", "kv_host_size"):
        value = getattr(args, name)
        if value and not args.enable_prefix_caching:
            raise ConfigError(
                f"{name} is {value}, but enable_prefix_caching is off: KV blocks move by the names that they have in "
                f"the prefix cache; switch it on, or leave out {name}"
            )
    for name in ("prefill", "role"):
        value = getattr(args, name)
        if value and args.data_parallel_size > 1:
            raise ConfigError(
                f"{name} is {value}, and data_parallel_size is {args.data_parallel_size}: "
                + ("prefill and decode say how many engines there are" if name == "prefill" else "a role is of one")
                + "; leave data_parallel_size out"
            )
    if args.role is not None and args.prefill:
        raise ConfigError(
            f"role is {args.role}, and prefill is {args.prefill}: an engine with a role is one of those that `octavo "
            "proxy` finds; leave out one of them"
        )
    if args.role is not None and args.cluster_secret_file is None:
        raise ConfigError(
            f"role is {args.role}, but cluster_secret_file is not set; give the engines and `octavo proxy` the same "
            "secret"
        )
    if args.prefill and args.nnodes > 1:
        raise ConfigError(
            f"prefill is {args.prefill}, and nnodes is {args.nnodes}: the engines of one server are on one machine; "
            "leave nnodes at 1, or start engines with role and `octavo proxy`"
        )
    if args.prefill and args.executor == "ray":
        raise ConfigError(
            f"prefill is {args.prefill}, but executor is ray: the engines of one server are on one machine; leave "
            "executor at multiprocess"
        )
    return TransferConfig(**{each.name: getattr(args, each.name) for each in dataclasses.fields(TransferArgs)})
