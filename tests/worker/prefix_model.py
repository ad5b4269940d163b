"""A model whose next token is a function of the whole prefix, read back from the KV cache through the block tables.

A wrong slot, a wrong table or a wrong token gives another answer than `next_token`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.attention.backend import CacheLayout
from octavo.attention.metadata import ModelInput
from octavo.core.model_shape import CacheGroup, KeysAndValues
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockOps, ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.devices.token_store import HostTokenStore
from octavo.worker.batch.input_batch import InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.cache_engine import Arena, CacheEngine
from octavo.worker.model_runner import ModelRunner, RunnerParts
from tests.conformance.runtimes import REFERENCE

VOCAB = 101
BLOCK_SIZE = 4


def next_token(prefix: Sequence[int]) -> int:
    """What `PrefixModel` gives as the likeliest token after `prefix`."""
    return sum((token + 1) * (position + 1) for position, token in enumerate(prefix)) % VOCAB


class PrefixModel:
    """Logits are 0 for the next token and fall with the distance from it. Tokens of `bad` make their row NaN."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.batches: list[list[int]] = []

    def __call__(self, batch: ModelInput) -> Tensor:
        (attention,) = batch.attention
        self.batches.append(batch.token_ids.tolist())
        slots = batch.kv_caches[0][0].view(-1, BLOCK_SIZE)  # of the keys: [blocks, block_size]
        blocks, places = attention.slot_mapping // BLOCK_SIZE, attention.slot_mapping % BLOCK_SIZE
        slots[blocks, places] = batch.token_ids.to(slots.dtype) + 1
        hidden = []
        for row, (queries, length) in enumerate(zip(attention.query_lengths, attention.lengths, strict=True)):
            assert batch.positions[int(attention.query_starts[row]) :][:queries].tolist() == list(
                range(length - queries, length)
            )
            table = attention.block_tables[row].tolist()
            stored = [slots[table[p // BLOCK_SIZE], p % BLOCK_SIZE].item() for p in range(length)]
            prefix = [int(value) - 1 for value in stored]
            assert int(attention.sequence_lengths[row]) == length
            for end in range(length - queries + 1, length + 1):
                hidden.append(float("nan") if self.bad in prefix[:end] else float(next_token(prefix[:end])))
        return torch.tensor(hidden).unsqueeze(1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        distance = (torch.arange(VOCAB) - hidden).abs()  # [rows, vocab]
        return -0.5 * distance


KEYS_AND_VALUES = (CacheGroup((0,), KeysAndValues(1, 1)),)
"""The cache groups of a model that has one."""


def make_runner(
    *,
    num_blocks: int = 32,
    num_host_blocks: int = 0,
    max_num_tokens: int = 64,
    bad: int | None = None,
    draws: bool = True,
    padded: Callable[[int], int] | None = None,
) -> tuple[ModelRunner, PrefixModel]:
    model = PrefixModel(bad)
    cache = CacheEngine(
        [Arena([0], CacheLayout((2, num_blocks + 1, 1, BLOCK_SIZE, 1), torch.float32), num_host_blocks)], REFERENCE
    )
    sequences = Sequences(HostTokenStore())
    builder = InputBatchBuilder(
        cache.caches,
        sequences,
        KEYS_AND_VALUES,
        block_size=BLOCK_SIZE,
        max_num_tokens=max_num_tokens,
        device=torch.device("cpu"),
    )
    parts = RunnerParts(
        model=model,
        cache=cache,
        sequences=sequences,
        builder=builder,
        vocab_size=VOCAB,
        sampler=ReferenceSampler() if draws else None,
        padded=padded,
    )
    return ModelRunner(parts), model


def new_sequence(
    seq_id: int, token_ids: Sequence[int], block_ids: Sequence[int], *, num_groups: int = 1, **fields: Any
) -> NewSequence:
    fields.setdefault("params", SamplingParams(temperature=0.0))
    fields.setdefault("num_prompt_tokens", len(token_ids))
    fields.setdefault("index", 0)
    fields.setdefault("epoch", 0)
    return NewSequence(seq_id=seq_id, token_ids=list(token_ids), block_tables=[list(block_ids)] * num_groups, **fields)


def row(seq_id: int, start: int, num_tokens: int, num_samples: int = 1, **fields: Any) -> ScheduledSequence:
    fields.setdefault("epoch", 0)
    return ScheduledSequence(seq_id=seq_id, start=start, num_tokens=num_tokens, num_samples=num_samples, **fields)


def step(
    new: Sequence[NewSequence] = (),
    rows: Sequence[ScheduledSequence] = (),
    finished: Sequence[int] = (),
    block_ops: BlockOps | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=1,
        new_sequences=list(new),
        rows=list(rows),
        finished_ids=list(finished),
        block_ops=block_ops or BlockOps(),
    )


def tokens_of(output: ModelRunnerOutput) -> list[list[int]]:
    assert [each.error for each in output.rows] == [None] * len(output.rows)
    return [[token.token_id for token in each.tokens] for each in output.rows]
