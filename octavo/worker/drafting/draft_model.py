"""Opens and loads a second model in a worker, which guesses tokens, and counts it in the memory plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import msgspec
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.config.checkpoint import Checkpoint
from octavo.config.schema import MODEL_METHODS, DraftConfig, SchedulerConfig
from octavo.config.speculative_args import ASSISTANT
from octavo.core.model_shape import CacheGroup, Encoded, State
from octavo.devices.device import Device
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.models.block_heads import BlockHead, MarkovHead
from octavo.models.decoder import DecoderStack
from octavo.models.draft_heads import DraftHead, Eagle3Head, mask_state, parallel_token, target_ids, usual_layers
from octavo.models.gemma4 import Gemma4Assistant
from octavo.models.loader import LoadedModel
from octavo.models.prediction_layer import PredictionLayer, prediction_layer
from octavo.models.registry import ModelClass
from octavo.models.state_heads import StateHead
from octavo.quantization.method import KeptAs
from octavo.quantization.registry import method_named
from octavo.sampling.sampler import Sampler
from octavo.worker.batch.input_batch import ImageTokenInputs, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.drafting.block_drafter import BlockDrafter, MarkovDrafter, ParallelDrafter
from octavo.worker.drafting.drafter import Drafter, DrafterParts, drawn_with, greedy, renamed
from octavo.worker.drafting.state_drafter import AssistantDrafter, StateDrafter
from octavo.worker.start.identity import model_digest
from octavo.worker.start.memory import ModelSizes
from octavo.worker.transfer.block_io import held_heads


class DraftModel:
    """The draft model of one rank, without weights until `load`."""

    def __init__(self, config: DraftConfig, target: LoadedModel, scheduler: SchedulerConfig) -> None:
        """target: the model that verifies. Raises ConfigError where the draft model keeps what cannot go back, or
        one of both an encoder's output; or CheckpointError."""
        self._config = config
        self._target = target.shape
        self._scheduler = scheduler
        checkpoint = Checkpoint.open(Path(config.path), config.overrides)
        checkpoint.served_len = scheduler.max_model_len
        model_class, mesh = _class_of(config.method, checkpoint)
        self._opened = LoadedModel.open(
            checkpoint,
            mesh,
            target.dtype,
            method_named(config.quantization, config.activation_bits),
            KeptAs(config.activation_bits),
            reads_images=False,
            model_class=model_class,
        )
        self.shape = self._opened.shape
        _check_kept(self.shape.cache_groups, target.shape.cache_groups)
        self.cache_groups: tuple[CacheGroup, ...] = tuple(
            msgspec.structs.replace(each, layers=tuple(target.shape.num_layers + layer for layer in each.layers))
            for each in self.shape.cache_groups
        )
        """The draft model's cache groups; its layers are counted after those of the model."""
        self.heads = [held_heads(each.keeps, Mesh.single()) for each in self.cache_groups]
        """Heads in the cache of each group: every rank has all of this model."""
        self.num_layers = self.shape.num_layers
        model, self._ids = self._opened.model, None
        self._mask_token = parallel_token(checkpoint) if config.method == "draft_model" else None
        self._mask_state: Tensor | None = None
        if isinstance(model, Eagle3Head | BlockHead):
            self._ids = target_ids(checkpoint, model.config.vocab_size, self._target.vocab_size)
            self._mask_token = model.config.mask_token
            if isinstance(model, Eagle3Head) and model.config.mask_token is not None:
                self._mask_state = mask_state(checkpoint, target.dtype, model.states_size)
            target.model.note_layers(model.config.noted_layers or usual_layers(self._target.num_layers))
        if config.is_parallel and self._mask_token is None:
            raise ConfigError(
                f"speculative_config: parallel_drafting is set, but {config.path} has no token for masks (pard_token, "
                "ptd_token_id, mask_token_id); leave it out, or take a model that guesses all tokens at once"
            )
        if isinstance(model, PredictionLayer) and model.layout.reads_stream:
            target.model.note_stream()
        if config.sample_method != "greedy" and model.config.vocab_size != self._target.vocab_size:
            raise ConfigError(
                f"speculative_config: draft_sample_method is {config.sample_method}, but the head {config.path} has "
                f"logits of {model.config.vocab_size:,} tokens, the model of {self._target.vocab_size:,}; take greedy"
            )

    def identity(self) -> dict[str, str]:
        """Return what decides the bits of its keys and values, besides those of the model. Raises CheckpointError."""
        return {
            "draft_model": model_digest(Checkpoint.open(Path(self._config.path), self._config.overrides)),
            "draft_quantization": str(self._config.quantization),
        }

    def joined(
        self,
        sizes: ModelSizes,
        device: Device,
        attention: AttentionBackend,
        block_size: int,
        *,
        has_steps: bool,
    ) -> ModelSizes:
        """Return the sizes of the model and of this one together. Each has activations of its own, where they are
        planned (`has_steps`)."""
        own = ModelSizes.of(self._opened, device, attention, self._scheduler, block_size, has_steps=has_steps)
        return replace(
            sizes,
            shape=msgspec.structs.replace(sizes.shape, cache_groups=sizes.shape.cache_groups + self.cache_groups),
            weights_bytes=sizes.weights_bytes + own.weights_bytes,
            position_bytes=sizes.position_bytes + own.position_bytes,
            layer_block_bytes=sizes.layer_block_bytes + own.layer_block_bytes,
            activation_bytes=lambda length: sizes.activation_bytes(length) + own.activation_bytes(length),
        )

    def check_tensors(self) -> None:
        """Compare the checkpoint with what the model reads. Raises CheckpointError."""
        self._opened.check_tensors()

    def load(
        self,
        device: Device,
        attention: AttentionBackend,
        target: DecoderStack,
        max_positions: int,
        max_model_len: int,
        dummy_seed: int | None = None,
    ) -> None:
        """Load the weights, or draw them. target: the loaded model. Raises CheckpointError."""
        self._loaded = self._opened.load(
            device.ops,
            attention,
            device=device.torch_device,
            dummy_seed=dummy_seed,
            max_positions=max_positions,
            max_model_len=max_model_len,
        )
        if isinstance(self._loaded, DraftHead | PredictionLayer | Gemma4Assistant):
            self._loaded.lend(target)

    def drafter(
        self, device: Device, cache: CacheEngine, sequences: Sequences, sampler: Sampler, block_size: int
    ) -> Drafter:
        """Return the drafter, which guesses the tokens of sequences after a step's rows; to be called after `load`."""
        num_tokens, loaded = self._scheduler.max_num_batched_tokens, self._loaded
        reads_models = isinstance(loaded, Gemma4Assistant)
        builder = InputBatchBuilder(
            cache.caches if reads_models else cache.draft_caches,
            sequences,
            self._target.cache_groups if reads_models else self.cache_groups,
            block_size=block_size,
            max_num_tokens=num_tokens,
            device=device.torch_device,
            first_group=0 if reads_models else len(self._target.cache_groups),
            # it may compute a part of a prompt that the model has computed whole
            image_tokens=ImageTokenInputs(has_spans=False),
        )
        is_head = isinstance(loaded, DraftHead | PredictionLayer)
        choose = greedy(min(self.shape.vocab_size, self._target.vocab_size))
        if self._config.sample_method != "greedy":
            choose = drawn_with(sampler)
        elif self._ids is not None:
            choose = renamed(choose, self._ids)
        parts = DrafterParts(builder, sequences, choose, self.shape)
        if reads_models:
            return AssistantDrafter(loaded, parts)
        if isinstance(loaded, StateHead):
            return StateDrafter(loaded, parts)
        if isinstance(loaded, BlockHead):
            return (MarkovDrafter if isinstance(loaded, MarkovHead) else BlockDrafter)(loaded, parts)
        model = loaded if is_head else device.recorded(loaded, num_tokens)
        if self._mask_token is not None and self._config.is_parallel is not False:
            state = None if self._mask_state is None else self._mask_state.to(device.torch_device)
            return ParallelDrafter(model, parts, self._mask_token, state)
        return Drafter(model, parts, is_head=is_head)


def _check_kept(own: Iterable[CacheGroup], of_target: Iterable[CacheGroup]) -> None:
    """Raise ConfigError where the draft model or the model keeps what rows with guesses cannot go back in."""
    for name, groups, refused in (("draft model", own, Encoded | State), ("model", of_target, Encoded)):
        kept = next((each.keeps for each in groups if isinstance(each.keeps, refused)), None)
        if kept is not None:
            raise ConfigError(
                f"speculative_config: the {name} keeps {kept.render()}, and a draft model keeps keys and values of "
                "tokens alone, beside models without an encoder's output; take another one, or leave "
                "speculative_config out"
            )


def _class_of(method: str, checkpoint: Checkpoint) -> tuple[ModelClass | None, Mesh]:
    """Return the class of the draft model or head, None for that of its architecture, and the mesh that it runs on."""
    if method == "mtp" and checkpoint.architecture != ASSISTANT:
        return prediction_layer(checkpoint)
    head = MODEL_METHODS[method].head
    return None if head is None else resolve_name(f"octavo.models.{head}"), Mesh.single()
