"""The tensors of a GGUF file as a checkpoint in Hugging Face layout has them, views of the mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.gguf.layout import Placed
from octavo.gguf.reader import read_gguf
from octavo.layers.layer import Parts
from octavo.models.weight_files import FLOAT_TYPES, StoredTensor, map_file, release_pages
from octavo.quantization.gguf import BLOCK_TYPES, SUFFIX, BlockType, dequantized


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
        if each.order.columns and tensor.type not in FLOAT_TYPES:
            order = partial(_order, each)
            yield StoredTensor(f"{name}/order", "I32", each.shape[-1:], 4 * each.shape[-1], tensor.file, order)
        values, release = partial(_values, own, each), partial(_release, own, each)
        yield StoredTensor(name, tensor.type, each.shape, each.nbytes, tensor.file, values, release)


def plain_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a file under the names that they have there, those of quantised types dequantised."""
    for tensor in read_gguf(path).tensors:
        (stored,) = gguf_tensors([Placed(tensor.name, tensor)])
        if (kind := BLOCK_TYPES.get(tensor.type)) is not None:
            stored = replace(stored, name=tensor.name, values=partial(_plain, kind, stored))
        yield stored


def _plain(kind: BlockType, stored: StoredTensor, parts: Parts) -> Tensor:
    return dequantized(kind, stored.values(parts))


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
        rows = placed.order.rows
        values = torch.cat([found[0][each] for each in rows]) if rows else found[0]
        values = values.permute(0, 2, 3, 1).flatten(1) if placed.is_kernel else values
        values = values.view(*placed.shape[:-1], -1) if placed.shape else values[0]
    if placed.order.columns and dtype is not None:
        values = torch.cat([values[..., each] for each in placed.order.columns], -1)
    for part in parts:
        values[part].reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()  # a byte of each page
    if placed.heads:
        values = values.reshape(placed.heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
    if placed.is_power:
        return _exponents(placed, values)
    return values.float() - placed.shift if placed.shift else values


def _order(placed: Placed, parts: Parts) -> Tensor:
    """Return the place in a checkpoint of each column: int32 [columns]."""
    places = torch.arange(placed.shape[-1], dtype=torch.int32)
    order = torch.empty_like(places)
    order[torch.cat([places[each] for each in placed.order.columns]).long()] = places
    return order


def _exponents(placed: Placed, values: Tensor) -> Tensor:
    """Return the float32 x with -exp(x) = values, to the bit where there is one. Raises CheckpointError."""
    powers = -values.float()
    if not ((powers > 0) & powers.isfinite()).all():
        raise CheckpointError(f"{placed.tensor.file}: {placed.tensor.name} has values that are not below zero")
    near = powers.double().log().float()
    steps = [(near.view(torch.int32) + step).view(torch.float32) for step in (-2, 2, -1, 1)]
    found = near
    # several may have the same power: those of fewer bits are what checkpoints in their types have
    for other in (*steps, near, near.half().float(), near.bfloat16().float()):
        found = torch.where(other.exp() == powers, other, found)
    return found
