"""Divides the memory of a rank: by arithmetic before weights are read, and by measuring the largest steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import msgspec

from octavo.config.explain import MemoryPlan, render_bytes
from octavo.config.schema import CacheConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.model_shape import Encoded
from octavo.devices.device import DeviceMemory
from octavo.devices.reference.sampler import reference_bytes
from octavo.sampling.chunks import rows_per_chunk
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.drawing import LOGITS_BYTES
from octavo.worker.start.loading import LoadedRank, RankParts
from octavo.worker.start.memory import ModelSizes, divide_memory, refusing_too_little
from octavo.worker.start.warm_up import NUM_BLOCKS, WarmUp

_PLANNED = "peak of the fullest step as planned; at start it is measured, and that decides"


class Sizing:
    """Finds how many KV blocks a rank has room for."""

    def __init__(self, parts: RankParts, cache: CacheConfig, num_ranks: int, kept_bytes: int) -> None:
        """num_ranks: ranks of this machine. kept_bytes: this rank's share of the host memory for KV blocks outside the
        cache that is not allocated yet."""
        self._parts, self._cache, self._num_ranks, self._kept_bytes = parts, cache, num_ranks, kept_bytes
        keeps = (group.keeps for group in parts.opened.shape.cache_groups)
        # made-up steps have no encoder's output, and draw
        self.is_measured = (
            parts.device.warms_up
            and parts.model.pooling is None
            and not any(isinstance(each, Encoded) for each in keeps)
        )
        """Whether the memory of steps is measured after loading the weights, instead of planned."""
        self._sizes: ModelSizes
        """The model's sizes before it is loaded."""

    @cached_property
    def _memory(self) -> DeviceMemory:
        """The device's memory before anything was loaded."""
        return self._parts.device.memory()

    def plan(self, *, is_dry: bool = False) -> MemoryPlan:
        """Return how the memory is divided before anything is loaded.

        Memory that is measured later counts as 0, so that only impossible settings are refused; with `is_dry` it is
        planned too, and weight files are compared with the config. Raises ConfigError, with a remedy, if memory is too
        small, and CheckpointError for files that do not match the config.
        """
        if is_dry and self._parts.model.load_format != "dummy":
            self._parts.check_tensors()
        sizes = self._find_sizes(has_steps=is_dry or not self.is_measured)
        self._sizes = replace(sizes, activations_because=_PLANNED) if self.is_measured else sizes
        return self._divided(self._sizes)

    def measured(
        self,
        plan: MemoryPlan,
        loaded: LoadedRank,
        make_cache: Callable[[CacheLimits], CacheEngine],
        max_model_len: int,
    ) -> MemoryPlan:
        """Execute the largest steps over small caches, which are dropped; return the plan from the memory that they
        took. max_model_len: tokens that a sequence has at most on every rank.

        Raises ConfigError, with a remedy, where they do not fit, or leave too little for the real caches.
        """
        device = self._parts.device
        device.release_idle()  # temporary memory of loading
        loaded_bytes = self._memory.available - device.memory().available
        num_groups = len(plan.cache.groups)
        small = plan.limited_to([NUM_BLOCKS] * num_groups, [0] * num_groups)
        taken = device.measure()
        with refusing_too_little("for the smallest KV caches", small.weights_bytes, small.kv_bytes):
            runner = loaded.runner(make_cache(small.cache), small.cache.block_size)
        steps = WarmUp(runner, self._parts.scheduler, small, max_model_len, self._parts.num_drafts)
        graph_bytes = steps.measure(taken) * device.most_graphs * loaded.num_recorded
        step_bytes = max(0, loaded_bytes + taken().peak - small.kv_bytes - (plan.weights_bytes - self._adapter_bytes))
        del steps, runner
        device.release_idle()
        note = f", {render_bytes(graph_bytes)} of it for graphs yet to be captured" if graph_bytes else ""
        because = f"measured: steps, and what graphs and libraries hold{note}"
        activation_bytes = step_bytes + graph_bytes
        return self._divided(
            replace(self._sizes, activation_bytes=lambda _: activation_bytes, activations_because=because)
        )

    @cached_property
    def _adapter_bytes(self) -> int:
        """Bytes reserved for adapters that are loaded while the engine runs."""
        parts = self._parts
        if not parts.lora.enable_lora:
            return 0
        from octavo.lora.slots import planned_bytes

        return planned_bytes(parts.opened.model, parts.lora, parts.scheduler.max_num_batched_tokens)

    def _find_sizes(self, *, has_steps: bool) -> ModelSizes:
        parts, block_size = self._parts, self._cache.block_size
        opened = parts.opened, parts.device, parts.backend, parts.scheduler, block_size
        sizes = ModelSizes.of(*opened, has_steps=has_steps)
        if parts.draft is not None:
            sizes = parts.draft.joined(sizes, parts.device, parts.backend, block_size, has_steps=has_steps)
        if has_steps and parts.model.logprobs_mode == "processed_logprobs":
            of_steps, beside = sizes.activation_bytes, self._described_bytes()
            sizes = replace(sizes, activation_bytes=lambda max_model_len: of_steps(max_model_len) + beside)
        return replace(sizes, weights_bytes=sizes.weights_bytes + self._adapter_bytes)

    def _described_bytes(self) -> int:
        """Return the most bytes of logits that are kept to describe tokens after they are drawn, and of describing
        them."""
        scheduler, vocab_size = self._parts.scheduler, self._parts.opened.shape.vocab_size
        num_rows = scheduler.max_num_seqs * (1 + scheduler.num_lookahead_slots)
        num_rows = min(num_rows, rows_per_chunk(vocab_size, LOGITS_BYTES))
        return 4 * num_rows * vocab_size + reference_bytes(num_rows, vocab_size)

    def _divided(self, sizes: ModelSizes) -> MemoryPlan:
        parts = self._parts
        plan = divide_memory(
            sizes,
            self._memory.share(self._num_ranks),
            cache=self._cache,
            scheduler=parts.scheduler,
            device=parts.device.name,
            user_set_max_model_len=parts.model.user_set_max_model_len,
            kept_bytes=self._kept_bytes,
        )
        rope_note = parts.opened.model.config.rope_note(parts.model.max_model_len)
        return msgspec.structs.replace(plan, share=parts.opened.share(), rope_note=rope_note)
