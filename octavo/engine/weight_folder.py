"""Weights in memory as the folder of a checkpoint, which every process of an engine can load."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from octavo.engine.sleep import checkpoint_path
from octavo.errors import ConfigError

_IN_MEMORY: Final = Path("/dev/shm")
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


class WeightFolder:
    """A folder with given weights and links to the other files of a checkpoint, in memory where they fit into the
    system's file system there. It is removed with the object, or by `close`; folders of killed processes are removed
    when another is made."""

    def __init__(self, checkpoint: Path, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """checkpoint: a directory. named_tensors: torch's, all of them, by the names that they have there; one that is
        the same as another is left out. Raises ConfigError where there is no such directory."""
        from safetensors.torch import save_file

        from octavo.kv_transfer.host_folder import HostFolder

        if not checkpoint.is_dir():
            raise ConfigError(
                f"{checkpoint} is a file, whose tensors have other names than those given; start with a directory"
            )
        tensors: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for name, given in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
            tensor = given.detach().contiguous()
            tensors.setdefault((tensor.device, tensor.data_ptr(), tensor.shape), (name, tensor))
        num_bytes = sum(each.nbytes for _, each in tensors.values())
        fits = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > num_bytes
        parent = _IN_MEMORY if fits else Path(tempfile.gettempdir())
        folder = HostFolder(parent / f"octavo-tensors-{secrets.token_hex(4)}")
        self._end_of_use = weakref.finalize(self, folder.close)
        self.path = folder.path
        for file in checkpoint.iterdir():
            if not file.name.endswith(_WEIGHTS):
                (self.path / file.name).symlink_to(file.resolve())
        save_file(dict(tensors.values()), self.path / "model.safetensors")

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._end_of_use()


class WeightUpdates:
    """Updates of the weights of an engine's cores, one after the other. call: makes a control call."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self._one_at_a_time = asyncio.Lock()
        self._in_use: WeightFolder | None = None

    async def make(self, path: str | Path, folder: WeightFolder | None) -> None:
        """Update all cores. folder: the one at `path`; it is closed after the next update. Raises RequestFailed."""
        try:
            async with self._one_at_a_time:
                await self._call("update_weights", checkpoint_path(path))
                folder, self._in_use = self._in_use, folder
        finally:
            if folder is not None:  # the previous folder, or that of a failed update
                await asyncio.to_thread(folder.close)

    async def close(self) -> None:
        """Remove the folder of the weights in use. Idempotent."""
        if self._in_use is not None:
            await asyncio.to_thread(self._in_use.close)
