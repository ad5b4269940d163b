"""The memory that a step takes beside weights and KV cache, found by a forward pass without data."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.attention.backend import AttentionBackend, StepSizes
from octavo.attention.metadata import AttentionMetadata, EncoderOutput, ModelInput, NotedStates
from octavo.config.schema import SchedulerConfig
from octavo.core.arithmetic import num_blocks_for
from octavo.core.model_shape import (
    Encoded,
    Indexed,
    IndexedLatent,
    Kept,
    KeysAndValues,
    Latent,
    ModelShape,
    Spaced,
    State,
)
from octavo.devices.device import Device
from octavo.models.loader import LoadedModel
from octavo.ops import block_sparse, chosen_tokens, compressed
from octavo.ops.registry import Ops
from octavo.sampling.chunks import rows_per_chunk
from octavo.worker.drawing import LOGITS_BYTES
from octavo.worker.shared_sampler import shared_sampling_bytes

_TOKEN_BYTES = 72
"""Token ids and positions, with the arrays that they are made from. Slots of each cache group come to them."""

_ROW_BYTES = 6 << 10
"""A row of the batch, its request for the sampler and its results, with log-probabilities of 20 tokens."""


class Activations:
    """The memory that steps of a model take on a device, for the memory plan."""

    def __init__(
        self, opened: LoadedModel, device: Device, attention: AttentionBackend, scheduler: SchedulerConfig
    ) -> None:
        self._opened = opened
        self._attention = attention
        self._num_tokens = scheduler.max_num_batched_tokens
        self._num_rows = min(scheduler.max_num_seqs, self._num_tokens)
        vocab_size = opened.shape.vocab_size
        # positions whose hidden states are copied to be sampled from
        sampled = min(self._num_tokens, self._num_rows * (1 + scheduler.num_lookahead_slots))
        # of one sequence's prompt, or where rows sample
        most = min(self._num_tokens, max(sampled, scheduler.max_model_len))
        self._logits_rows = min(most, rows_per_chunk(vocab_size, LOGITS_BYTES))
        self._fixed_bytes = (
            device.activation_bytes(self._run, self._num_tokens)
            + device.sampling_bytes(self._logits_rows, vocab_size)
            + shared_sampling_bytes(self._logits_rows, vocab_size, opened.mesh)
            + sampled * opened.shape.hidden_size * opened.dtype.itemsize
            + self._num_tokens * (_TOKEN_BYTES + 8 * len(opened.shape.cache_groups))
            + self._num_rows * _ROW_BYTES
        )

    def num_bytes(self, max_model_len: int, block_size: int) -> int:
        """Return the most bytes for sequences of at most `max_model_len` tokens."""
        shape = self._opened.shape
        kept = {group.keeps for group in shape.cache_groups}
        workspace = max((self._workspace_bytes(each, max_model_len) for each in kept), default=0)
        tables = 4 * self._num_rows * num_blocks_for(max_model_len, block_size) * len(shape.cache_groups)
        return self._fixed_bytes + workspace + tables

    def _workspace_bytes(self, keeps: Kept, max_model_len: int) -> int:
        """Return the most bytes that what reads a layer's cache allocates beside its output."""
        num_tokens, num_heads = self._num_tokens, self._opened.shape.num_heads
        match keeps:
            case State():
                return 0
            case Spaced(size, stride):
                num_seen = max_model_len // stride if stride > 1 else 0
                windows = (
                    each.window or 0 for each in self._opened.shape.cache_groups if isinstance(each.keeps, Spaced)
                )
                own = compressed.workspace_bytes(size, num_seen, num_tokens, num_heads)
                return own + self._gathered_bytes(num_seen + max(windows), size, size)
            case Indexed(kv_heads, dim, small_size, num_seen):
                num_seen = num_seen or max_model_len
                own = block_sparse.workspace_bytes(kv_heads, dim, small_size, num_seen, max_model_len, num_tokens)
                return own + self._gathered_bytes(num_seen, dim, 0, kv_heads)
            case IndexedLatent(size, value_size, small_size, num_seen):
                own = chosen_tokens.workspace_bytes(size, small_size, num_seen, max_model_len, num_tokens, num_heads)
                return own + self._gathered_bytes(num_seen, size, value_size)
            case Latent(size, value_size):
                return self._attention_bytes(max_model_len, 1, size, value_size)
            case Encoded():
                return self._attention_bytes(keeps.num_tokens, keeps.kv_heads, keeps.head_dim)
            case KeysAndValues(kv_heads, dim):
                return self._attention_bytes(max_model_len, kv_heads, dim)

    def _gathered_bytes(self, num_keys: int, size: int, value_size: int, kv_heads: int = 1) -> int:
        num_heads, element_size = self._opened.shape.num_heads, self._opened.dtype.itemsize
        sizes = StepSizes(self._num_tokens, num_keys, num_heads, kv_heads, size, element_size, value_size)
        return self._attention.gathered_bytes(sizes, num_keys)

    def _attention_bytes(self, max_length: int, kv_heads: int, dim: int, value_size: int = 0) -> int:
        num_heads, element_size = self._opened.shape.num_heads, self._opened.dtype.itemsize
        return self._attention.workspace_bytes(
            StepSizes(self._num_tokens, max_length, num_heads, kv_heads, dim, element_size, value_size)
        )

    def _run(self, ops: Ops, attention: AttentionBackend, num_tokens: int, *, is_decode: bool = False) -> int:
        with self._opened.bound_dry(ops, attention) as model:
            batch = _dry_input(num_tokens, self._opened.shape, self._opened.dtype)
            if model.received_size is not None:
                batch = replace(batch, received=self._opened.received_buffers(num_tokens, "meta"))
            result = model(batch)
            if not model.is_last:
                return sum(part.nbytes for part in result.parts)
            if not is_decode and model.is_last and model.config.has_head:
                hidden = result.hidden if isinstance(result, NotedStates) else result
                model.compute_logits(hidden[: self._logits_rows])
            num_bytes: int = result.nbytes
            return num_bytes


def _dry_input(num_tokens: int, shape: ModelShape, dtype: torch.dtype) -> ModelInput:
    ids = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    small = torch.empty(0, dtype=torch.int32, device="meta")
    metadata = AttentionMetadata(small, small, small, ids, 1, (num_tokens,), (num_tokens,))
    places = sorted((layer, place) for place, group in enumerate(shape.cache_groups) for layer in group.layers)
    keeps = [shape.cache_groups[place].keeps for _, place in places]
    # states are cut into parts, and so are blocks of what operators read
    parted = State | Indexed | IndexedLatent | Spaced
    caches = [
        torch.empty(1, 1, each.num_values, device="meta") if isinstance(each, parted) else small for each in keeps
    ]
    encoded = [
        EncoderOutput(torch.empty(each.num_tokens, shape.hidden_size, dtype=dtype, device="meta"), metadata)
        for each in keeps[-1:]
        if isinstance(each, Encoded)
    ]
    return ModelInput(ids, ids, (metadata,) * len(shape.cache_groups), caches, encoded=encoded)
