"""The tensors of a GGUF file as a checkpoint in Hugging Face layout has them, views of the mapped file."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from octavo.gguf.layout import Placed, placed_tensors
from octavo.gguf.reader import GGUFFile
from octavo.layers.layer import Parts
from octavo.models.weight_files import FLOAT_TYPES, StoredTensor, map_file, release_pages
from octavo.quantization.gguf import SUFFIX


def gguf_tensors(file: GGUFFile) -> Iterator[StoredTensor]:
    """Yield every tensor that a model may read. Those of quantised types are blocks uint8 [..., bytes of a row] under
    a name with `SUFFIX`. Raises CheckpointError."""
    pages = {path: map_file(path) for path in file.files}
    for placed in placed_tensors(file):
        tensor = placed.tensor
        own = pages[tensor.file]
        name, is_plain = placed.name, tensor.type in FLOAT_TYPES and not placed.part
        if not is_plain:
            name = f"{name.removesuffix('.weight')}{SUFFIX}"
            name += f"/{placed.part}" if placed.part else ""
        values, release = partial(_values, own, placed), partial(release_pages, own, *_range(placed))
        yield StoredTensor(name, tensor.type, placed.shape, _range(placed)[1], tensor.file, values, release)


def _range(placed: Placed) -> tuple[int, int]:
    """Return the first byte and the number of bytes of a tensor, or of the expert's part of it."""
    tensor = placed.tensor
    if placed.expert is None:
        return tensor.offset, tensor.nbytes
    nbytes = tensor.nbytes // tensor.shape[0]
    return tensor.offset + placed.expert * nbytes, nbytes


def _values(pages: mmap.mmap, placed: Placed, parts: Parts) -> Tensor:
    start, nbytes = _range(placed)
    dtype = FLOAT_TYPES.get(placed.tensor.type)
    stored = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start).view(*placed.shape[:-1], -1)
    values = stored if dtype is None else stored.view(dtype)
    for part in parts:
        values[part].reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()  # a byte of each page
    if placed.heads:
        values = values.reshape(placed.heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
    return values.float() - placed.shift if placed.shift else values
