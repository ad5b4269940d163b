"""Models opened and loaded in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.attention.backend import AttentionBackend
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.decoder import DecoderStack
from octavo.models.loader import LoadedModel
from octavo.models.registry import resolve_model
from octavo.ops.registry import Ops
from octavo.quantization.method import WeightMethod

ONE = Mesh.single()


def read_config(path: Path) -> Any:
    """Return what the family of a checkpoint reads from its config."""
    checkpoint = Checkpoint.open(path)
    return resolve_model(checkpoint).read(checkpoint)


def open_model(
    checkpoint: Checkpoint, mesh: Mesh = ONE, *, dtype: torch.dtype = torch.float32, method: WeightMethod | None = None
) -> DecoderStack:
    """Return the model without memory."""
    return LoadedModel.open(checkpoint, mesh, dtype, method).model


def load_model(
    checkpoint: Checkpoint,
    *,
    backend: AttentionBackend,
    ops: Ops,
    dtype: torch.dtype,
    mesh: Mesh = ONE,
    method: WeightMethod | None = None,
    **options: Any,
) -> DecoderStack:
    """Return the model ready to run; `options` are those of `LoadedModel.load`."""
    return LoadedModel.open(checkpoint, mesh, dtype, method).load(ops, backend, **options)
