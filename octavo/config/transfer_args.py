"""What a person may set about prefill and decode in different cores, and about KV blocks outside the cache; a part of
`args`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from octavo.config.fields import Arg


@dataclass(frozen=True, kw_only=True)
class TransferArgs:
    """Which engines compute prompts and which decode, and where KV blocks are kept besides the cache."""

    heading: ClassVar = "Prefill and decode apart, and KV that is kept"

    prefill: Annotated[
        int,
        Arg(
            "Engines of this server or AsyncLLM that compute long prompts and hand them over to those of --decode, "
            "each in a process of its own with an equal share of the processors and of the memory.",
            ge=0,
            le=256,
        ),
    ] = 0
    decode: Annotated[
        int, Arg("Engines beside those of --prefill that compute everything else; shares are equal.", ge=0, le=256)
    ] = 0
    role: Annotated[
        str | None,
        Arg(
            "Run one engine, without HTTP, for `octavo proxy` on this or another machine.",
            choices=("prefill", "decode"),
        ),
    ] = None
    kv_host: Annotated[
        str, Arg("Address at which an engine with a role gives KV blocks to others; 0.0.0.0 is every one.")
    ] = "127.0.0.1"
    kv_port: Annotated[int, Arg("Port at kv_host; 0 takes a free one.", ge=0, le=65535)] = 0
    kv_lease_s: Annotated[
        float, Arg("Seconds that an engine keeps KV blocks for another one that it does not hear from.", gt=0, le=86400)
    ] = 30.0
    split_min_tokens: Annotated[
        int | None,
        Arg(
            "Prompts with fewer tokens than this that are not cached stay on a decode engine. By default what follows "
            "from the measured speeds of computing and of handing over.",
            ge=1,
        ),
    ] = None
    kv_disk: Annotated[
        str | None, Arg("Directory that keeps KV blocks of prompts, also for later starts of the same model.")
    ] = None
    kv_disk_size: Annotated[
        int | None,
        Arg("Most room that kv_disk takes, with a suffix such as 50GiB. By default 20GiB.", ge=1, is_bytes=True),
    ] = None
    kv_host_size: Annotated[
        int | None,
        Arg(
            "Memory of the machine that keeps KV blocks of prompts for all engines of a server, with a suffix such as "
            "2GiB. By default none.",
            ge=1,
            is_bytes=True,
        ),
    ] = None
