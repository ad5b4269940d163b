"""What a person may set about traces of torch's profiler, and the names of their files."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from octavo.errors import InvalidRequest


class ProfilerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `profiler_config`, with vLLM's names. Every rank writes a trace of its own into a directory.

    profiler: torch, or None for none. torch_profiler_dir: the directory, which is made where there is none.
    The others say what a trace has beside times: Python's stacks, shapes of tensors, memory, floating-point operations;
    and whether the file is compressed.
    """

    profiler: Literal["torch"] | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True


def profile_name(prefix: str | None) -> str:
    """Return the name of a trace that begins now, to which each rank adds its own. Raises InvalidRequest."""
    if prefix is not None and (not isinstance(prefix, str) or not prefix or "/" in prefix or "\0" in prefix):
        raise InvalidRequest(
            f"profile_prefix is {prefix!r:.80}, must be the beginning of a file's name, without /",
            field="profile_prefix",
        )
    return f"{prefix or 'profile'}-{time.time_ns()}"
