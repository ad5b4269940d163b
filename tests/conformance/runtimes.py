"""The runtimes that conformance is tested with: every level of this machine, the model of the tiles included."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from octavo.ops.registry import Ops, bind, open_runtime
from octavo.platform import Platform

PLATFORM = Platform.detect()
LEVELS: tuple[str, ...] = ()
if PLATFORM.native_module is not None:
    from octavo import _native

    LEVELS = tuple(_native.instruction_sets())

TYPES = (torch.float32, torch.bfloat16)


@cache
def runtime(level: str, threads: int = 1) -> Any:
    """One runtime per level and number of threads, for all tests."""
    return open_runtime(PLATFORM, threads, level)


@cache
def ops(level: str, threads: int = 1) -> Ops:
    """The operators bound to it."""
    return bind(PLATFORM, runtime=runtime(level, threads))
