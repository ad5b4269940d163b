"""Opens the models of a worker, without their weights, for the rank that it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.checkpoint import Checkpoint
from octavo.config.media_args import media_limits
from octavo.config.sounds import sound_section
from octavo.distributed.mesh import Mesh
from octavo.models.loader import DTYPES, LoadedModel
from octavo.quantization.registry import method_named

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig, TransferConfig


def check_sizes(config: EngineConfig) -> None:
    """Raise ConfigError where the ranks cannot share the model, or CheckpointError."""
    open_model(config, place_of(config, rank=0))


def place_of(config: EngineConfig, rank: int) -> Mesh:
    """Return the place of a rank, without connections to others."""
    device = config.device
    sizes = {"tensor": device.tensor_parallel_size, "pipeline": device.pipeline_parallel_size}
    place = Mesh.of_rank(rank, **sizes, whole_experts=device.enable_expert_parallel)
    return replace(place, reduce=device.tensor_parallel_reduce)


def open_model(config: EngineConfig, mesh: Mesh) -> LoadedModel:
    """Open a rank's part of the model. Raises CheckpointError or ConfigError."""
    model, bits, checkpoint = config.model, config.model.activation_bits, Checkpoint.open(Path(config.model.path))
    method = method_named(model.quantization, bits, requantizes=model.allow_requantize)
    kind = "image" if sound_section(checkpoint) is None else "audio"
    has_encoder = media_limits(model)[kind] > 0
    return LoadedModel.open(checkpoint, mesh, DTYPES[model.dtype], method, bits, model.pooling, has_encoder)


def kept_bytes(transfer: TransferConfig, num_ranks: int) -> int:
    """Return what each of `num_ranks` ranks has yet to take of the host's memory for blocks outside the cache."""
    if transfer.kv_host_size is None:
        return 0
    from octavo.kv_transfer.host_folder import size_of

    return max(0, transfer.kv_host_size - size_of(Path(transfer.host_folder))) // num_ranks
