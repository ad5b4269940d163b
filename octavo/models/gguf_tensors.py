"""The tensors of a GGUF file as a checkpoint in Hugging Face layout has them, views of the mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.gguf.layout import Placed
from octavo.layers.layer import Parts
from octavo.models.weight_files import FLOAT_TYPES, StoredTensor, map_file, release_pages
from octavo.quantization.gguf import SUFFIX


def gguf_tensors(placed: Iterable[Placed]) -> Iterator[StoredTensor]:
    """Yield every tensor that a model may read. Those of quantised types are blocks uint8 [..., bytes of a row] under
    a name with `SUFFIX`. Raises CheckpointError."""
    pages: dict[Path, mmap.mmap] = {}
    for each in placed:
        tensor, name = each.tensor, each.name
        if tensor.file not in pages:
            pages[tensor.file] = map_file(tensor.file)
        own = pages[tensor.file]
        if tensor.type not in FLOAT_TYPES or each.part:
            name = f"{name.removesuffix('.weight')}{SUFFIX}"
            name += f"/{each.part}" if each.part else ""
        values, release = partial(_values, own, each), partial(_release, own, each)
        yield StoredTensor(name, tensor.type, each.shape, each.nbytes, tensor.file, values, release)


def _ranges(placed: Placed) -> list[tuple[int, int]]:
    """Return the first byte and the number of bytes of each tensor, or of the expert's part of it."""
    if placed.expert is None:
        return [(each.offset, each.nbytes) for each in placed.parts]
    return [(placed.tensor.offset + placed.expert * placed.nbytes, placed.nbytes)]


def _release(pages: mmap.mmap, placed: Placed) -> None:
    for offset, nbytes in _ranges(placed):
        release_pages(pages, offset, nbytes)


def _values(pages: mmap.mmap, placed: Placed, parts: Parts) -> Tensor:
    dtype, shape = FLOAT_TYPES.get(placed.tensor.type), placed.tensor.shape[placed.expert is not None :]
    found = []
    for start, nbytes in _ranges(placed):
        stored = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start).view(*shape[:-1], -1)
        found.append(stored if dtype is None else stored.view(dtype))
    if len(found) > 1:
        values = torch.stack(found, 2) if len(shape) == 4 else torch.cat(found)
    else:
        values = found[0].view(*placed.shape[:-1], -1)
    for part in parts:
        values[part].reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()  # a byte of each page
    if placed.heads:
        values = values.reshape(placed.heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
    return values.float() - placed.shift if placed.shift else values
