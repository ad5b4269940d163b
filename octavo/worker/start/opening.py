"""Opens the models of a worker, without their weights, for its rank, and makes their samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.attention.backend import AttentionBackend
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.media.sounds import sound_section
from octavo.config.media_args import media_limits
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.models.decoder import PROOF_BLOCK_SIZE
from octavo.models.loader import DTYPES, LoadedModel
from octavo.ops.registry import Ops, bind
from octavo.quantization.method import KeptAs
from octavo.quantization.registry import method_named
from octavo.sampling.processed_logprobs import ProcessedLogprobs
from octavo.sampling.processors.speech import speech_rules
from octavo.sampling.sampler import Sampler
from octavo.structured_output.matchers import Matchers
from octavo.structured_output.processor import GrammarProcessor
from octavo.structured_output.sampler import GuidedSampler

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig, ModelConfig, TransferConfig
    from octavo.devices.device import Device
    from octavo.worker.drafting.draft_model import DraftModel


def check_sizes(config: EngineConfig) -> None:
    """Raise ConfigError where the ranks cannot share the model, or CheckpointError."""
    open_model(config, mesh_of_rank(config, rank=0))


def mesh_of_rank(config: EngineConfig, rank: int) -> Mesh:
    """Return the mesh as a rank sees it, without connections to others."""
    device = config.device
    sizes = {"tensor": device.tensor_parallel_size, "pipeline": device.pipeline_parallel_size}
    place = Mesh.of_rank(rank, **sizes, whole_experts=device.enable_expert_parallel)
    return replace(place, reduce=device.tensor_parallel_reduce)


def proving_parts(device: Device) -> tuple[Ops, Callable[[int], AttentionBackend]]:
    """Return the operators with which `DecoderStack.proof` computes, and the function that makes a backend for a head
    size.

    They are the device's if its tensors are in host memory, as those of the proof, else the reference's: the proof
    tests how a class was taken apart, not the operators.
    """
    if device.torch_device.type != "cpu":
        return bind(), lambda _: ReferenceBackend()

    def attention(head_dim: int) -> AttentionBackend:
        return device.attention(*[torch.float32] * 2, head_dims=[head_dim], block_size=PROOF_BLOCK_SIZE).backend

    return device.ops, attention


def open_model(config: EngineConfig, mesh: Mesh, *, keeps_float8: bool = False) -> LoadedModel:
    """Open a rank's part of the model. keeps_float8: as the device says. Raises CheckpointError or ConfigError."""
    model, bits = config.model, config.model.activation_bits
    checkpoint = Checkpoint.of(model)
    method = method_named(model.quantization, bits, requantizes=model.allow_requantize)
    read = {"image": image_settings(checkpoint), "audio": sound_section(checkpoint)}
    has_encoder = any(media_limits(model)[kind] > 0 for kind, found in read.items() if found is not None)
    kept_as = KeptAs(bits, keeps_float8)
    return LoadedModel.open(checkpoint, mesh, DTYPES[model.dtype], method, kept_as, model.pooling, has_encoder)


def open_samplers(
    model: ModelConfig, device: Device, *, has_forms: bool
) -> tuple[Sampler, Sampler, GrammarProcessor | None]:
    """Return the device's sampler, the one that waits for grammars around it, and the processor of grammars; with
    `has_forms` False the same sampler twice and None."""
    matchers = Matchers(Path(model.tokenizer_path), model.vocab_size, model.eos_token_ids)
    grammars = GrammarProcessor(matchers) if has_forms else None
    own = device.sampler([each for each in (grammars, speech_rules(model.speech)) if each is not None])
    sampler = ProcessedLogprobs(own) if model.logprobs_mode == "processed_logprobs" else own
    return own, sampler if grammars is None else GuidedSampler(sampler, grammars), grammars


def open_models(config: EngineConfig, mesh: Mesh, device: Device) -> tuple[LoadedModel, DraftModel | None]:
    """Open the rank's part of the model, and the model that guesses for it, where there is one. Raises CheckpointError
    or ConfigError."""
    opened = open_model(config, mesh, keeps_float8=device.keeps_float8)
    if config.draft is None:
        return opened, None
    from octavo.worker.drafting.draft_model import DraftModel

    return opened, DraftModel(config.draft, opened, config.scheduler)


def kept_bytes(transfer: TransferConfig, num_ranks: int) -> int:
    """Return the bytes of host memory that each of `num_ranks` ranks will still allocate for blocks outside the
    cache."""
    if transfer.kv_host_size is None:
        return 0
    from octavo.kv_transfer.host_folder import size_of

    return max(0, transfer.kv_host_size - size_of(Path(transfer.host_folder))) // num_ranks
