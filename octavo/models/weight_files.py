"""Reading the tensors of weight files, one ahead of its use, and a progress bar."""

from __future__ import annotations

import mmap
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.gguf_checkpoint import GGUFCheckpoint
from octavo.config.safetensors_header import TensorInfo, read_header
from octavo.errors import CheckpointError
from octavo.gguf.reader import is_gguf
from octavo.layers.layer import Parts

if TYPE_CHECKING:
    from rich.console import Console

_TYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}
"""Names of types in safetensors."""
FLOAT_TYPES: Final = {name: _TYPES[name] for name in ("F64", "F32", "F16", "BF16")}
"""Types of plain weights."""
FLOATS: Final = frozenset(FLOAT_TYPES)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a weight file, before it is read."""

    name: str
    dtype: str
    """Its type by its name in safetensors (F32, BF16, …), or in torch for types that safetensors has no name for."""
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    values: Callable[[Parts], Tensor]
    """Returns a view of the file with the pages of some parts in memory. Raises CheckpointError."""
    release: Callable[[], None] = lambda: None
    """Releases its pages. A view that is still read gets them back from the file."""


class Wanted(NamedTuple):
    """A tensor, and the parts of it that are read."""

    tensor: StoredTensor
    parts: Parts

    @property
    def nbytes(self) -> int:
        """Bytes of the parts."""
        shape = self.tensor.shape
        elements = sum(
            prod(len(range(size)[index]) for size, index in zip(shape, part, strict=False)) * prod(shape[len(part) :])
            for part in self.parts
        )
        return self.tensor.nbytes * elements // (prod(shape) or 1)


def checkpoint_tensors(checkpoint: Checkpoint) -> Iterator[StoredTensor]:
    """Yield every tensor of a checkpoint. Raises CheckpointError."""
    if isinstance(checkpoint, GGUFCheckpoint):
        from octavo.models.gguf_tensors import gguf_tensors

        return gguf_tensors(checkpoint.placed())
    return (tensor for file in checkpoint.weight_files() for tensor in stored_tensors(file.path))


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield every tensor of a safetensors file, PyTorch archive or GGUF file, in the order of the file; those of a GGUF
    file are dequantised.

    Raises CheckpointError for a damaged file, and for an archive that holds anything but tensors.
    """
    if is_gguf(path):
        from octavo.models.gguf_tensors import plain_tensors

        yield from plain_tensors(path)
    elif path.suffix == ".safetensors":
        yield from _tensors_of_safetensors(path)
    else:
        yield from _tensors_of_archive(path)


def read_ahead(wanted: Iterable[Wanted], limit_bytes: int) -> Iterator[tuple[Wanted, Tensor]]:
    """Yield each tensor with its values, of which a thread reads the parts while the caller works on the one before.

    Besides the tensor that the caller has, at most `limit_bytes` are read, or a single larger tensor.
    """
    waiting: deque[tuple[Wanted, int, Future[Tensor]]] = deque()
    waiting_bytes = 0
    reader = ThreadPoolExecutor(1, thread_name_prefix="octavo-reader")
    try:
        for each in wanted:
            nbytes = each.nbytes
            # the first is the one that the caller gets next
            while waiting and waiting_bytes - waiting[0][1] + nbytes > limit_bytes:
                first, first_bytes, future = waiting.popleft()
                waiting_bytes -= first_bytes
                yield first, future.result()
            waiting.append((each, nbytes, reader.submit(each.tensor.values, each.parts)))
            waiting_bytes += nbytes
        while waiting:
            first, _, future = waiting.popleft()
            yield first, future.result()
    finally:
        reader.shutdown(cancel_futures=True)


@contextmanager
def progress_bar(title: str, total_bytes: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error that disappears at the end; the function it yields advances it by bytes.

    Where standard error is no terminal nothing is shown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = console or Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def _tensors_of_safetensors(path: Path) -> Iterator[StoredTensor]:
    header = read_header(path)
    pages = map_file(path)
    for info in sorted(header.values(), key=lambda info: info.offset):
        values, release = partial(_mapped, pages, info), partial(release_pages, pages, info.offset, info.nbytes)
        yield StoredTensor(info.name, info.dtype, info.shape, info.nbytes, path, values, release)


def _mapped(pages: mmap.mmap, info: TensorInfo, parts: Parts) -> Tensor:
    dtype = _TYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{info.file}: {info.name} is stored as {info.dtype}, expected one of {', '.join(_TYPES)}"
        )
    count = prod(info.shape)
    if not count:
        return torch.empty(info.shape, dtype=dtype)
    if info.offset % dtype.itemsize:
        values = torch.frombuffer(pages, dtype=torch.uint8, count=info.nbytes, offset=info.offset).clone().view(dtype)
    else:
        values = torch.frombuffer(pages, dtype=dtype, count=count, offset=info.offset)
    values = values.view(info.shape)
    for part in parts:
        read = values[part].view(torch.uint8) if dtype.itemsize == 1 else values[part]
        read = read.view(-1) if read.is_contiguous() else read
        read[..., :: max(1, mmap.PAGESIZE // dtype.itemsize)].sum()  # an element of each page
    return values


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            # private, so that nothing can reach the file: torch requires memory that it could write to
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be mapped ({error.strerror}); copy the model to a disk of this machine"
        ) from error


def release_pages(pages: mmap.mmap, offset: int, nbytes: int) -> None:
    """Release the memory of a part of a mapped file."""
    if hasattr(mmap, "MADV_DONTNEED") and nbytes:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        pages.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)


def _tensors_of_archive(path: Path) -> Iterator[StoredTensor]:
    try:
        # archives of before PyTorch 1.6 are no zip files and cannot be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        # every failure of the decoder is a fault of the file; it executes no code of the file
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path}: cannot be read as weights ({reason[:200]}); download it again or use a safetensors checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected a mapping from name to tensor")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: entry {name!r} is a {type(value).__name__}, expected a name with a tensor")
        if value.layout is not torch.strided:
            raise CheckpointError(f"{path}: {name} is stored as {value.layout}, expected a dense tensor")
        dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype))
        yield StoredTensor(name, dtype, tuple(value.shape), value.nbytes, path, partial(_of_archive, value))


def _of_archive(value: Tensor, parts: Parts) -> Tensor:
    return value.detach()
