"""A model on a paged cache, stepped by hand: what the runner does, without scheduler or sampler."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.attention.backend import cache_layout
from octavo.attention.metadata import AttentionMetadata, EncoderOutput, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Encoded
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.models.decoder import DecoderStack
from octavo.ops.registry import bind
from tests.models.loading import load_model

BLOCK_SIZE = 4


@dataclass
class Stream:
    """A sequence: its tokens, how many are in the cache, its blocks, and the logits of every computed token."""

    token_ids: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    encoding: list[int] = field(default_factory=list)
    """Blocks of what an encoder made of its sound."""
    sound: Tensor | None = None
    """What the next step encodes."""


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderStack:
    """The checkpoint on the references, which keep weights as they are; `options` are others of `load_model`."""
    usual = {"mesh": Mesh.single(), "backend": ReferenceBackend(), "ops": bind()}
    return load_model(Checkpoint.open(path), dtype=dtype, **usual | options)


class PagedRun:
    """Steps streams over caches whose blocks are dealt in random order."""

    def __init__(self, model: Any, num_blocks: int = 300, dtype: torch.dtype | None = None) -> None:
        """dtype: of the caches; that of the model's parameters unless given."""
        self.model = model
        shape = model.config.shape()
        keeps = shape.cache_groups[-1].keeps
        self.num_encoded = keeps.num_tokens if isinstance(keeps, Encoded) else 0
        self.num_groups = len(shape.cache_groups) - (self.num_encoded > 0)
        backend = ReferenceBackend(dtype or next(model.parameters()).dtype)
        layouts = [cache_layout(backend, group.keeps, num_blocks, BLOCK_SIZE) for group in shape.cache_groups]
        places = sorted((layer, place) for place, group in enumerate(shape.cache_groups) for layer in group.layers)
        self.caches = [torch.zeros(layouts[place].shape, dtype=layouts[place].dtype) for _, place in places]
        self.free = list(range(1, num_blocks))
        random.Random(0).shuffle(self.free)

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[Stream, int]]) -> None:
        """Compute the next `count` tokens of every (stream, count)."""
        for stream, count in rows:
            while len(stream.table) * BLOCK_SIZE < stream.computed + count:
                stream.table.append(self.free.pop())
        spans = [range(stream.computed, stream.computed + count) for stream, count in rows]
        batch = ModelInput(
            torch.tensor([stream.token_ids[i] for (stream, _), span in zip(rows, spans, strict=True) for i in span]),
            torch.tensor([i for span in spans for i in span]),
            [
                AttentionMetadata.build(
                    [len(span) for span in spans], [span.stop for span in spans], [s.table for s, _ in rows], BLOCK_SIZE
                )
            ]
            * self.num_groups
            + self._cross(rows),
            self.caches,
            encoded=[self._encode(stream) for stream, _ in rows if stream.sound is not None],
        )
        logits = self.model.compute_logits(self.model(batch))
        for (stream, count), found in zip(rows, logits.split([count for _, count in rows]), strict=True):
            stream.logits.extend(found)
            stream.computed += count

    def _cross(self, rows: Sequence[tuple[Stream, int]]) -> list[AttentionMetadata]:
        """Every token sees the whole sound."""
        if not self.num_encoded:
            return []
        for stream, _ in rows:
            while len(stream.encoding) * BLOCK_SIZE < self.num_encoded:
                stream.encoding.append(self.free.pop())
        tables = [stream.encoding for stream, count in rows for _ in range(count)]
        return [AttentionMetadata.build([1] * len(tables), [self.num_encoded] * len(tables), tables, BLOCK_SIZE)]

    def _encode(self, stream: Stream) -> EncoderOutput:
        states = self.model.encode("audio", {"input_features": stream.sound})
        slots = [block * BLOCK_SIZE + place for block in stream.encoding for place in range(BLOCK_SIZE)]
        stream.sound = None
        return EncoderOutput(states, AttentionMetadata.of_slots(torch.tensor(slots[: len(states)]), BLOCK_SIZE))

    def decode(self, streams: Sequence[Stream], steps: int) -> None:
        """Append each stream's likeliest token, `steps` times; all streams in one batch."""
        for _ in range(steps):
            for stream in streams:
                stream.token_ids.append(int(stream.logits[-1].argmax()))
            self.step([(stream, 1) for stream in streams])


def logits_of(
    model: Any, token_ids: Iterable[int] = (5, 6, 7), num_decoded: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """Logits [tokens, vocabulary] of a prompt that is computed at once, and of tokens that are decoded behind it."""
    run, stream = PagedRun(model, dtype=dtype), Stream([*token_ids])
    run.step([(stream, len(stream.token_ids))])
    run.decode([stream], num_decoded)
    return torch.stack(stream.logits)


def generated(model: Any, dtype: torch.dtype = torch.float32) -> tuple[list[list[int]], Tensor]:
    """Tokens and logits of two prompts, one computed in two chunks, and of two decode steps, one beginning a block."""
    run, streams = PagedRun(model, dtype=dtype), [Stream([5, 9, 77]), Stream(list(range(3, 24)))]
    run.step([(streams[0], 3), (streams[1], 9)])
    run.step([(streams[1], 12)])
    run.decode(streams, 2)
    return [stream.token_ids for stream in streams], torch.stack([row for each in streams for row in each.logits])
