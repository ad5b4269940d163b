"""Reading the tensors of one weight file, memory-mapped, and the bar that shows how far it is."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Console


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in a safetensors file or PyTorch archive; the tensors are views of the file.

    Raises CheckpointError for a damaged file, and for an archive that holds anything but tensors.
    """
    if path.suffix == ".safetensors":
        yield from _read_safetensors(path)
    else:
        yield from _read_archive(path)


@contextmanager
def progress_bar(title: str, total_bytes: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error that goes away when it is done; the function it yields advances it by bytes.

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


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # in the order of the file, which reads it from front to back
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); download it again") from error


def _read_archive(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        # archives of before PyTorch 1.6 are no zip files and cannot be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        # whatever the decoder trips over is a fault of the file: it executes nothing that the file says
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
        yield name, value
