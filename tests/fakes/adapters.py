"""Folders that look like adapters where nothing reads more of them than their bytes."""

from __future__ import annotations

from pathlib import Path


def adapter_folder(path: Path, weights: bytes = b"w", config: bytes = b"{}") -> Path:
    """Make a folder with the two files of an adapter, or change them; return it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_bytes(config)
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path
