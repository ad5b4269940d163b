"""The section of prefill and decode apart, and what it needs of other arguments."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from octavo.config.args import EngineArgs
from octavo.config.fields import values_of
from octavo.config.schema import TransferConfig
from octavo.config.transfer_args import TransferArgs
from octavo.errors import ConfigError

_APART = "a prompt that one engine computes is decoded by another one; give at least one of each"
_ONE_MACHINE = "the engines of one server are on one machine; leave it out, or use role and `octavo proxy`"
_SHARED_MEMORY: Final = Path("/dev/shm")


def transfer_config(args: EngineArgs) -> TransferConfig:
    """Return the section. Raises ConfigError where its arguments contradict each other, or others."""
    engines = ("prefill", "decode", "role")
    blocks = ("prefill", "role", "kv_disk", "kv_host_size")
    replicas, machines = args.data_parallel_size, args.nnodes
    for names, is_wrong, because in (
        (("prefill",), not args.decode, f"decode is 0: {_APART}"),
        (("decode",), not args.prefill, f"prefill is 0: {_APART}"),
        (
            blocks,
            not args.enable_prefix_caching,
            "enable_prefix_caching is off, which names the KV blocks; switch it on",
        ),
        (
            blocks,
            args.record_trace is not None,
            "record_trace is set, which does not record KV from elsewhere; leave it out",
        ),
        (engines, replicas > 1, f"data_parallel_size is {replicas}: it is for engines without roles; leave it out"),
        (("role",), args.prefill, f"prefill is {args.prefill}: a role is of one engine; leave out one of them"),
        (("role",), args.cluster_secret_file is None, "cluster_secret_file is not set; give all engines the same"),
        (("kv_disk_size",), args.kv_disk is None, "kv_disk is not set, whose size it limits; give a directory"),
        (("prefill",), machines > 1, f"nnodes is {machines}: {_ONE_MACHINE}"),
        (("prefill",), args.executor == "ray", f"executor is ray: {_ONE_MACHINE}"),
    ):
        wrong = next((name for name in names if getattr(args, name)), None)
        if is_wrong and wrong is not None:
            raise ConfigError(f"{wrong} is {getattr(args, wrong)}, but {because}")
    host_folder = "" if args.kv_host_size is None else _new_host_folder()
    given = values_of(args, TransferArgs)
    if args.kv_disk_size is None:
        del given["kv_disk_size"]
    return TransferConfig(host_folder=host_folder, **given)


def _new_host_folder() -> str:
    if not _SHARED_MEMORY.is_dir():
        raise ConfigError(f"kv_host_size is set, but this system has no {_SHARED_MEMORY}; use kv_disk")
    return str(_SHARED_MEMORY / f"octavo-kv-{secrets.token_hex(8)}")
