"""What a person may set about traces of torch's profiler, and the names of their files."""

from __future__ import annotations

import re
import time
from typing import Final, Literal

import msgspec

from octavo.errors import InvalidRequest

MOST_CHARACTERS: Final = 40
"""Of the beginning of a file's name, whose rest is about as long; names have at most 255 bytes."""
_BEGINNING: Final = re.compile(f"[^/\\x00-\\x1f\\x7f\\ud800-\\udfff]{{1,{MOST_CHARACTERS}}}")


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
    if prefix is not None and not (isinstance(prefix, str) and _BEGINNING.fullmatch(prefix)):
        raise InvalidRequest(
            f"profile_prefix is {prefix!r:.80}, must be the beginning of a file's name: 1 to {MOST_CHARACTERS} "
            "characters, without / and control characters",
            field="profile_prefix",
        )
    return f"{prefix or 'profile'}-{time.time_ns()}"
