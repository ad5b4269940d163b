"""What a worker's start can do before torch is imported, in threads beside that import. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.checkpoint import Checkpoint
from octavo.models.packed_folder import PackedFolder

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig


def read_ahead(config: EngineConfig) -> PackedFolder | None:
    """Begin to read the weights, packed ones where they are kept; returns the folder that keeps them."""
    model = config.model
    if model.load_format == "dummy":
        return None
    checkpoint = Checkpoint.open(Path(model.path))
    if model.packed_cache is None:
        checkpoint.fetch_ahead()
        return None
    folder = PackedFolder(
        Path(model.packed_cache),
        max_bytes=model.packed_cache_bytes,
        threads=config.device.threads,
        is_default=not model.user_set_packed_cache,
    )
    wanted = {"checkpoint": str(checkpoint.path.resolve()), "dtype": model.dtype}
    if not folder.read_ahead({**wanted, "method": model.quantization or "unquantized"}):
        checkpoint.fetch_ahead()
    return folder
