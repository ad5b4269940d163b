"""Which attention backend and which sampler a model gets, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.attention.backend import AttentionBackend
from octavo.devices.cpu.attention import CpuBackend, Runtime
from octavo.devices.cpu.sampler import NativeSampler, native_bytes
from octavo.devices.reference.attention import ReferenceBackend
from octavo.devices.reference.sampler import ReferenceSampler, reference_bytes
from octavo.sampling.filters import Filter, default_filters
from octavo.sampling.processors import LogitsProcessor, default_processors
from octavo.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and the reason for it."""

    backend: AttentionBackend
    because: str


def choose_backend(
    runtime: Runtime | None,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    head_dim: int,
    block_size: int,
) -> BackendChoice:
    """The compiled kernels where there are any and they can, plain torch otherwise.

    `runtime` is what the device's kernels run with; None where there are none.
    """
    if runtime is None:
        return BackendChoice(ReferenceBackend(cache_dtype), "no compiled kernels run here")
    obstacle = CpuBackend.obstacle(dtype, cache_dtype, head_dim, block_size)
    if obstacle is not None:
        return BackendChoice(ReferenceBackend(cache_dtype), obstacle)
    return BackendChoice(CpuBackend(runtime, cache_dtype), f"compiled; runs at {runtime.cpu.instruction_set}")


def make_sampler(runtime: Any, processors: Sequence[LogitsProcessor] = (), filters: Sequence[Filter] = ()) -> Sampler:
    """The sampler for the device's runtime (`ops.registry.open_runtime`): the reference where there is none.

    `processors` act before those that sampling parameters ask for, `filters` after them.
    """
    if runtime is None:
        return ReferenceSampler((*processors, *default_processors()), (*default_filters(), *filters))
    return NativeSampler(runtime.cpu, processors, filters)


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """Most bytes that `Sampler.sample` holds for that many rows of logits, whichever sampler it is."""
    return max(reference_bytes(num_rows, vocab_size), native_bytes(num_rows, vocab_size))
