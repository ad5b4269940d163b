"""Loads the models of a rank, or of its pipeline stage, and makes runners of them over KV caches."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from octavo.attention.backend import AttentionBackend
from octavo.attention.metadata import IntermediateTensors, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.media_args import media_limits
from octavo.config.own_adapters import own_adapters
from octavo.config.schema import EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from octavo.devices.device import Device, DrawingModel, LanguageModel
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.models.decoder import DecoderStack
from octavo.models.loader import LoadedModel
from octavo.sampling.processors.speech import speech_rules
from octavo.worker.batch.input_batch import ImageTokenInputs, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.launching import make_runner
from octavo.worker.model_runner import ModelRunner, RunnerParts
from octavo.worker.prompt_encodings import encodings_of
from octavo.worker.shared_sampler import shared
from octavo.worker.start.ahead import Ahead
from octavo.worker.start.memory import longest_sequence
from octavo.worker.start.opening import open_models, open_samplers

if TYPE_CHECKING:
    from octavo.lora.slots import AdapterSlots
    from octavo.worker.drafting.draft_model import DraftModel

_log = logging.getLogger(__name__)

_PROGRESS_FROM_BYTES: Final = 256 << 20
"""Least bytes of a model whose loading shows a progress bar: smaller ones load faster than a bar appears."""


@dataclass(frozen=True)
class RankParts:
    """The parts that a rank computes with; its models are opened but not loaded."""

    device: Device
    backend: AttentionBackend
    mesh: Mesh
    opened: LoadedModel
    draft: DraftModel | None
    model: ModelConfig
    scheduler: SchedulerConfig
    lora: LoRAConfig
    num_drafts: int = 0
    """Most guesses that a row verifies."""

    def load(self, ahead: Ahead, max_model_len: int) -> LoadedRank:
        """Load the weights. max_model_len: what sequences of this rank have at most.

        Raises CheckpointError, or ConfigError for a folder of packed weights that cannot be made.
        """
        model, device, opened = self.model, self.device, self.opened
        dummy_seed = (model.seed or 0) if model.load_format == "dummy" else None
        max_positions = longest_sequence(max_model_len, self.scheduler)
        with device.loading(opened.plain_bytes, ahead.pages):
            loaded = opened.load(
                device.ops,
                self.backend,
                device=device.torch_device,
                dummy_seed=dummy_seed,
                # weights on a GPU are neither mapped from a file nor written to one
                packed=ahead.packed if device.torch_device.type == "cpu" else None,
                max_positions=max_positions,
                max_model_len=model.max_model_len,
                progress=sys.stderr.isatty() and opened.model.planned_bytes(device.ops) >= _PROGRESS_FROM_BYTES,
            )
        if self.draft is not None:
            self.draft.load(device, self.backend, loaded, max_positions, max_model_len, dummy_seed)
        adapters = None
        if self.lora.enable_lora:
            from octavo.lora.slots import AdapterSlots

            sizes = self.lora, self.scheduler.max_num_batched_tokens
            adapters = AdapterSlots(loaded, device.ops, *sizes, device.torch_device)
            # else a damaged one is found at the first image or sound
            for own in own_adapters(Checkpoint.of(model), media_limits(model)) if dummy_seed is None else ():
                adapters.check_adapter(own.path)
        if model.trust_remote_code and self.mesh.rank == 0:
            _log.info(
                "trust_remote_code has no effect: octavo runs no code from checkpoints, and has %s built in",
                type(opened.model).__name__,
            )
        if not self.is_recordable and self.mesh.rank == 0:
            _log.info("ranks that share a layer are on several machines: steps run without recordings, more slowly")
        return LoadedRank(self, loaded, adapters)

    def reopened(self, config: EngineConfig) -> RankParts:
        """Return these parts with the models of a configuration with other weights, not loaded.

        Raises CheckpointError, or ConfigError where its model is another one than that of these parts.
        """
        opened, draft = open_models(config, self.mesh, self.device)
        ours, theirs = self.opened.model.config, opened.model.config
        values: list[tuple[str, Any, Any]] = [("family", type(self.opened.model).__name__, type(opened.model).__name__)]
        values += [
            (each.name, getattr(ours, each.name), getattr(theirs, each.name, None))
            for each in fields(ours)
            if each.compare
        ]
        values.append(("weights", self.opened.stored_as(), opened.stored_as()))
        for name, our, their in values:
            if _plain(our) != _plain(their) and not callable(our):
                raise ConfigError(
                    f"{config.model.path} has another model: its {name} is {their}, that of this engine {our}; give a "
                    "checkpoint of the same model, or start another engine"
                )
        parts = replace(self, opened=opened, draft=draft, model=config.model)
        parts.check_tensors()
        return parts

    def check_tensors(self) -> None:
        """Compare the checkpoints with what the models read. Raises CheckpointError."""
        self.opened.check_tensors()
        if self.draft is not None:
            self.draft.check_tensors()

    @property
    def is_recordable(self) -> bool:
        """Whether the calls between ranks may be part of recorded steps."""
        return self.mesh.tensor.size == 1 or self.mesh.tensor_group.is_recordable


def _plain(value: Any) -> Any:
    """Return the form in which a value is compared: for a config of transformers its values, because those of layers
    that differ cannot be read by one name."""
    return value.to_dict() if hasattr(value, "to_dict") else value


@dataclass(frozen=True)
class LoadedRank:
    """The models of a rank with their weights."""

    parts: RankParts
    loaded: DecoderStack
    adapters: AdapterSlots | None

    @property
    def num_recorded(self) -> int:
        """Number of models whose steps a device may record, each separately."""
        return 1 + (self.parts.draft is not None) + (self.adapters is not None)

    def runner(self, cache: CacheEngine, block_size: int) -> ModelRunner:
        """Return a runner that executes steps over these caches, with nothing recorded yet. Raises CheckpointError."""
        parts, loaded = self.parts, self.loaded
        model, device, mesh, opened = parts.model, parts.device, parts.mesh, parts.opened
        num_tokens = parts.scheduler.max_num_batched_tokens
        recorded = partial(device.recorded, loaded, num_tokens if parts.is_recordable else 0)
        model_of_rank = recorded() if self.adapters is None else self.adapters.around(loaded, recorded)
        padded = model_of_rank.padded if isinstance(model_of_rank, DrawingModel) else None
        if mesh.pipeline.size > 1:
            received = opened.received_buffers(num_tokens, device.torch_device)
            model_of_rank = Stage(model_of_rank, mesh, received)
        own, sampler, grammars = open_samplers(model, device, has_forms=loaded.is_last and mesh.tensor.rank == 0)
        vocab_size, groups = opened.shape.vocab_size, opened.shape.cache_groups
        sequences = Sequences(device.token_store(), cache.num_groups)
        drafter = pooler = None
        if parts.draft is not None:
            drafter = parts.draft.drafter(device, cache, sequences, sampler, block_size)
        if model.pooling is not None and loaded.is_last:
            from octavo.worker.pooling import Pooler

            pooler = Pooler(model.pooling, loaded, mesh, Path(model.path))
        runner_parts = RunnerParts(
            model=model_of_rank,
            cache=cache,
            sequences=sequences,
            builder=InputBatchBuilder(
                cache.caches,
                sequences,
                groups,
                block_size=block_size,
                max_num_tokens=num_tokens,
                device=device.torch_device,
                image_tokens=ImageTokenInputs(has_kinds=loaded.config.has_image_experts),
            ),
            vocab_size=vocab_size,
            sampler=shared(sampler, mesh, vocab_size, [speech_rules(model.speech)]) if loaded.is_last else None,
            pooler=pooler,
            grammars=grammars,
            launches_logprobs=model.logprobs_mode == "raw_logprobs",
            suggests=parts.num_drafts > 0,
            drafter=drafter,
            encodings=encodings_of(loaded, groups, device, num_tokens, opened.dtype if model.embedding_size else None),
            padded=padded,
        )
        return make_runner(runner_parts, own, mesh)


class Stage:
    """Receives what the stage before sends, runs `model`, and sends what it returns to the next stage.

    Sending and receiving are not part of recorded steps: `received`, room for the tokens of the largest step, stays in
    its place, so a recording reads it again.
    """

    def __init__(self, model: LanguageModel, mesh: Mesh, received: IntermediateTensors | None) -> None:
        """received: None for the first stage."""
        self._model: Callable[[ModelInput], Any] = model
        self._mesh = mesh
        self._received = received
        self.compute_logits = model.compute_logits

    def __call__(self, batch: ModelInput) -> Any:
        """Return the last hidden states [tokens, hidden]; a stage that is not the last, what it sent."""
        mesh, stage = self._mesh, self._mesh.pipeline.rank
        if self._received is not None:
            num_tokens = len(batch.token_ids)
            hidden, residual = self._received
            received = IntermediateTensors(hidden[:num_tokens], None if residual is None else residual[:num_tokens])
            for part in received.parts:
                mesh.receive(part, stage - 1)
            batch = replace(batch, received=received)
        result = self._model(batch)
        if isinstance(result, IntermediateTensors):
            for part in result.parts:
                mesh.send(part, stage + 1)
        return result
