"""What a person may set about prefill and decode in different cores, and about KV blocks outside the cache; a part of
`args`."""

from __future__ import annotations

from typing import Literal

from octavo.config.fields import ArgumentGroup, arg


class TransferArgs(ArgumentGroup, heading="Prefill and decode apart, and KV that is kept"):
    """Which engines compute prompts and which decode, and where KV blocks are kept besides the cache."""

    prefill: int = arg(
        0,
        "Engines of this server or AsyncLLM that compute long prompts and hand them over to those of --decode, "
        "each in a process of its own with an equal share of the processors and of the memory.",
        ge=0,
        le=256,
    )
    decode: int = arg(
        0, "Engines beside those of --prefill that compute everything else; shares are equal.", ge=0, le=256
    )
    role: Literal["prefill", "decode"] | None = arg(
        None, "Run one engine, without HTTP, for `octavo proxy` on this or another machine."
    )
    kv_host: str = arg(
        "127.0.0.1", "Address at which an engine with a role gives KV blocks to others; 0.0.0.0 is every one."
    )
    kv_port: int = arg(0, "Port at kv_host; 0 takes a free one.", ge=0, le=65535)
    kv_lease_s: float = arg(
        30.0, "Seconds that an engine keeps KV blocks for another one that it does not hear from.", gt=0, le=86400
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
