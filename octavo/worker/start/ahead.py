"""Work of a worker's start that needs no torch, done in threads while torch is imported. Imports no torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.checkpoint import QUANTIZATION, Checkpoint
from octavo.devices.cuda.driver import open_ahead
from octavo.distributed.parts import part_name
from octavo.models.packed_folder import PackedFolder
from octavo.ops.pages import Pages
from octavo.platform import usable_memory

if TYPE_CHECKING:
    from octavo.config.schema import DeviceConfig, EngineConfig, ModelConfig

_BYTES_PER_WEIGHT = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5, "int4-g128": 0.5}
_PAGES_FROM_BYTES = 64 << 20
"""Least bytes of memory that are populated ahead: less takes no time."""


@dataclass(frozen=True)
class Ahead:
    """`packed` keeps packed weights; `pages` are memory for weights that have to be packed."""

    packed: PackedFolder | None = None
    pages: Pages | None = None

    @property
    def taken_bytes(self) -> int:
        """Bytes of populated memory, which the memory plan has not divided yet."""
        return 0 if self.pages is None else self.pages.populated_bytes


def read_ahead(config: EngineConfig, rank: int = 0) -> Ahead:
    """Begin to read the weights of a rank: packed ones where they are kept, else the checkpoint and memory to pack them
    in. The ranks of a machine share what rank 0 reads of the checkpoint. A GPU, whose context is opened meanwhile, has
    neither of both."""
    model, device = config.model, config.device
    if device.has_gpus and device.executor != "ray":  # which decides what the process sees
        open_ahead(config.place(rank))
    if model.load_format == "dummy":
        return Ahead()
    checkpoint, packed = Checkpoint.of(model), None
    if model.packed_directory is not None and device.device != "cuda":
        packed = PackedFolder(
            Path(model.packed_directory),
            max_bytes=model.packed_cache_size,
            threads=device.threads,
            is_default=not model.user_set_packed_cache,
        )
        if packed.read_ahead(_packed_as(model, device, checkpoint, rank)):
            return Ahead(packed)
    if rank == 0:
        checkpoint.fetch_ahead()
    if device.has_gpus or device.device == "reference" or device.op_overrides:
        return Ahead(packed)  # other operators and devices keep their weights elsewhere
    num_ranks = device.tensor_parallel_size * device.pipeline_parallel_size
    return Ahead(packed, _pages(model, checkpoint, config.cache.gpu_memory_utilization / num_ranks, num_ranks))


def _packed_as(model: ModelConfig, device: DeviceConfig, checkpoint: Checkpoint, rank: int) -> dict[str, str]:
    """Return what is known ahead of the packed weights of a rank, by which they are found."""
    part = part_name(
        rank,
        tensor=device.tensor_parallel_size,
        pipeline=device.pipeline_parallel_size,
        reduce=device.tensor_parallel_reduce,
        whole_experts=device.enable_expert_parallel,
    )
    stored = "unquantized" if checkpoint.section(QUANTIZATION) is None else "stored"
    path, method = str(checkpoint.path.resolve()), model.quantization or stored
    return {"checkpoint": path, "dtype": model.dtype, "ranks": part, "method": method}


def _pages(model: ModelConfig, checkpoint: Checkpoint, share: float, num_ranks: int) -> Pages | None:
    """Return memory for the packed weights of a rank; None where they are small, or fill half of its share of what is
    available."""
    tensors = checkpoint.tensors.values()
    num_weights = sum(prod(tensor.shape) for tensor in tensors)
    num_bytes = int(num_weights * _BYTES_PER_WEIGHT[model.quantization or model.dtype]) // num_ranks
    is_plain = checkpoint.gguf is not None and checkpoint.gguf.is_plain
    if not (checkpoint.section(QUANTIZATION) is None or model.quantization or is_plain):
        num_bytes = checkpoint.weights_bytes() // num_ranks
    if not _PAGES_FROM_BYTES <= num_bytes <= usable_memory().available * share / 2:
        return None
    pages = Pages(num_bytes)
    # the largest tensor is mapped while it is packed: both together are to be no more than all weights packed
    pages.populate(max(0, num_bytes - max(tensor.nbytes for tensor in tensors)))
    return pages


def collect_frozen() -> None:
    """Collect all garbage, also among what a process has frozen since its start; what is alive is frozen again."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, no garbage is collected: what is imported and loaded stays, and the search among it costs a tenth of a
    start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
