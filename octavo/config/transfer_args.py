"""Prefill and decode in different cores, and KV blocks outside the cache: what a person may set, and what follows."""

from __future__ import annotations

import secrets
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from octavo.config.fields import ArgumentGroup, arg
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs


_APART = "a prompt that one engine computes is decoded by another one; give at least one of each"
_ONE_MACHINE = "the engines of one server are on one machine; leave it out, or use role and `octavo proxy`"
_SHARED_MEMORY: Final = Path("/dev/shm")


class TransferArgs(ArgumentGroup, heading="Disaggregated prefill, and KV that is kept"):
    """Which engines compute prompts and which decode, and where KV blocks are kept besides the cache."""

    prefill: int = arg(
        0,
        "Engines of this server or AsyncLLM that compute long prompts and hand them over to those of --decode, "
        "each in a process of its own with an equal share of the processors and of the memory.",
        ge=0,
        le=256,
    )
    decode: int = arg(
        0, "Engines that compute everything else, beside those of --prefill; all have equal shares.", ge=0, le=256
    )
    role: Literal["prefill", "decode"] | None = arg(
        None, "Run one engine, without HTTP, for `octavo proxy` on this or another machine."
    )
    kv_host: str = arg(
        "127.0.0.1",
        "Address at which an engine with a role gives KV blocks to others; 0.0.0.0 is every one. Where --host is no "
        "loopback address, that one by default.",
    )
    kv_port: int = arg(0, "Port at kv_host; 0 takes a free one.", ge=0, le=65535)
    kv_lease_s: float = arg(
        30.0, "Seconds that an engine keeps KV blocks for another engine without hearing from it.", gt=0, le=86400
    )
    split_min_tokens: int | None = arg(
        None,
        "Prompts with fewer tokens than this that are not cached stay on a decode engine. By default what follows "
        "from the measured speeds of computing and of handing over.",
        ge=1,
    )
    kv_disk: str | None = arg(
        None, "Directory that keeps KV blocks of prompts, also for later starts of the same model."
    )
    kv_disk_size: int | None = arg(
        None, "Most room that kv_disk takes, with a suffix such as 50GiB. By default 20GiB.", ge=1, is_bytes=True
    )
    kv_host_size: int | None = arg(
        None,
        "Memory of the machine that keeps KV blocks of prompts for all engines of a server, with a suffix such as "
        "2GiB. By default none.",
        ge=1,
        is_bytes=True,
    )


class TransferConfig(TransferArgs):
    """Disaggregated prefill, and KV blocks outside the cache.

    role: of this core, also where a server has cores of both roles. kv_host: an address, or for a core of such a
    server a directory, which begins with "/" and in which the core makes its Unix sockets under names of its own.
    host_folder: where all engines of the server keep the blocks of kv_host_size.
    secret: hexadecimal digits, which those cores prove to each other; empty where cluster_secret_file has the secret.
    """

    kv_disk_size: int = 20 << 30
    secret: str = field(default="", repr=False)
    host_folder: str = ""

    @property
    def moves_blocks(self) -> bool:
        """Return whether the core has a connector: for other engines, or for tiers."""
        return self.role is not None or self.kv_disk is not None or self.kv_host_size is not None

    @property
    def is_split(self) -> bool:
        """Return whether one front has cores of both roles."""
        return self.prefill > 0


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
    disk_size = {} if args.kv_disk_size is None else {"kv_disk_size": args.kv_disk_size}
    return TransferConfig.of(args, host_folder=host_folder, **disk_size)


def _new_host_folder() -> str:
    if not _SHARED_MEMORY.is_dir():
        raise ConfigError(f"kv_host_size is set, but this system has no {_SHARED_MEMORY}; use kv_disk")
    return str(_SHARED_MEMORY / f"octavo-kv-{secrets.token_hex(8)}")
