"""The attention backend of a model, from its configuration."""

from __future__ import annotations

from octavo.attention.cache_format import CACHE_DTYPES
from octavo.config.checkpoint import Checkpoint
from octavo.config.schema import CacheConfig, ModelConfig
from octavo.devices.choice import BackendChoice, choose_backend
from octavo.devices.cpu.attention import Runtime
from octavo.distributed.mesh import Mesh
from octavo.models.loader import DTYPES, make_model


def attention_backend(
    checkpoint: Checkpoint, runtime: Runtime | None, *, model: ModelConfig, cache: CacheConfig
) -> BackendChoice:
    """What serves the heads of this checkpoint. Raises CheckpointError."""
    dtype = DTYPES[model.dtype]
    shape = make_model(checkpoint, Mesh.single(), dtype=dtype).config.shape()
    return choose_backend(
        runtime,
        dtype,
        CACHE_DTYPES[cache.dtype],
        head_dim=shape.head_dim,
        block_size=cache.block_size,
    )
