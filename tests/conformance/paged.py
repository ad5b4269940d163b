"""Sequences in a paged cache whose unwritten slots are poisoned, computed in any cut and mixture of steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, Scores
from octavo.attention.cache_format import dequantize, is_quantized, quantize
from octavo.attention.metadata import AttentionMetadata

Step = list[tuple[int, int, int]]
"""Rows of a step: (sequence, first position, end position)."""


@dataclass(frozen=True)
class Heads:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    scale: float = 0.15
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    has_sinks: bool = False
    ahead: int = 0
    value_size: int = 0
    """Elements of a key that are its value, where latents are kept; one head."""

    def slopes(self) -> Tensor | None:
        return torch.linspace(0.02, 0.3, self.heads) if self.alibi else None

    def sinks(self) -> Tensor | None:
        return torch.linspace(-3.0, 6.0, self.heads) if self.has_sinks else None

    def scores(self) -> Scores:
        return Scores(self.scale, self.window, self.soft_cap, self.slopes(), self.sinks(), self.ahead)


@dataclass(frozen=True)
class Sequences:
    """Queries, keys and values of whole sequences, each [tokens, heads, dim]."""

    shape: Heads
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    tables: list[list[int]]

    @classmethod
    def make(cls, shape: Heads, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> Sequences:
        """Random ones; blocks are dealt from a shuffled pool."""
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int) -> list[Tensor]:
            return [torch.randn(n, heads, shape.dim, generator=generator).to(dtype) for n in lengths]

        needed = [-(-n // shape.block_size) for n in lengths]
        pool = list(range(1, sum(needed) + 1))
        random.Random(seed).shuffle(pool)
        tables = [[pool.pop() for _ in range(count)] for count in needed]
        return cls(shape, draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads), tables)

    def lengths(self) -> list[int]:
        return [len(q) for q in self.q]

    def whole(self) -> list[Step]:
        """All sequences in one prefill."""
        return [[(i, 0, n) for i, n in enumerate(self.lengths())]]

    def compute(
        self, backend: AttentionBackend, steps: list[Step], poison: int = 0xFF, *, forgets: bool = False
    ) -> list[Tensor]:
        """The answers [tokens, heads, dim] of all sequences, from an empty cache full of `poison` bytes (NaN).

        `forgets`: blocks that left the window are full of poison again, and tables have the null block in their place.
        """
        shape, tables = self.shape, [list(table) for table in self.tables]
        num_blocks = sum(map(len, self.tables)) + 1
        size = backend.cache_shape(num_blocks, shape.block_size, shape.kv_heads, shape.dim, shape.value_size)
        cache = torch.zeros(size, dtype=backend.element_type)
        cache.view(torch.uint8).fill_(poison)
        answers = [torch.full_like(q[..., : shape.value_size or None], float("nan")) for q in self.q]
        for step in steps:
            for i, start, _ in step if forgets and shape.window is not None else ():
                for place in range(max(0, start - shape.window + 1) // shape.block_size):
                    cache.view(torch.uint8)[:, tables[i][place]] = poison
                    tables[i][place] = 0
            metadata = AttentionMetadata.build(
                [stop - start for _, start, stop in step],
                [stop for _, _, stop in step],
                [tables[i] for i, _, _ in step],
                shape.block_size,
            )
            q, k, v = (torch.cat([each[i][start:stop] for i, start, stop in step]) for each in (self.q, self.k, self.v))
            if shape.value_size:
                sizes = [shape.value_size, shape.dim - shape.value_size]
                (kept, rest), parts = (each.split(sizes, -1) for each in (k.squeeze(1), q.contiguous()))
                queries = parts[0].contiguous(), parts[1].contiguous()
                found = backend.run_latents(queries, (kept, rest), cache, metadata, shape.scale).clone()
            else:
                found = backend.run(q, k, v, cache, metadata, shape.scores()).clone()
            for (i, start, stop), answer in zip(
                step, found.split([stop - start for _, start, stop in step]), strict=True
            ):
                answers[i][start:stop] = answer
        return answers

    def expected(self, cache_dtype: torch.dtype, every: int = 1) -> list[Tensor]:
        """The answers in float64, from keys and values as `cache_dtype` rounds them: of each `every`th token."""
        return [
            attend(self.shape, q, _rounded(k, cache_dtype), self._values(k, v, cache_dtype), every)
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def _values(self, k: Tensor, v: Tensor, cache_dtype: torch.dtype) -> Tensor:
        size = self.shape.value_size
        return _rounded(k, cache_dtype)[..., :size] if size else _rounded(v, cache_dtype)


def attend(shape: Heads, q: Tensor, k: Tensor, v: Tensor, every: int = 1) -> Tensor:
    """Causal attention of one sequence in float64: softmax over the visible keys, nothing else."""
    positions = torch.arange(len(q))
    distance = positions[None, :] - positions[::every, None]  # key minus query
    shared, q = shape.heads // shape.kv_heads, q[::every]
    k, v = (each.double().repeat_interleave(shared, dim=1).transpose(0, 1) for each in (k, v))  # [heads, tokens, dim]
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * shape.scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    slopes = shape.slopes()
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    hidden = distance > shape.ahead
    if shape.window is not None:
        hidden |= distance <= -shape.window
    scores, sinks = scores.masked_fill(hidden, float("-inf")), shape.sinks()
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return (scores.softmax(-1)[..., : len(positions)] @ v).transpose(0, 1)


def _rounded(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """What is read back of `x`."""
    if is_quantized(cache_dtype):
        return dequantize(*quantize(x, cache_dtype), torch.float64)
    return x.to(cache_dtype)


def cut_steps(
    inputs: Sequence[Tensor], cuts: Sequence[int], block_size: int, beside: Sequence[Tensor] | None = None
) -> Iterator[tuple[AttentionMetadata, list[Tensor], int]]:
    """Yield the steps that compute a sequence up to each of `cuts` in turn: rows, inputs, and its number of tokens.

    inputs: of all its tokens, [tokens, ...] each. beside: those of another sequence that is computed in each step, too;
    its blocks come behind those of the first, which begin with block 1.
    """
    num_blocks, start = -(-cuts[-1] // block_size), 0
    for end in cuts:
        counts, lengths, tables = [end - start], [end], [list(range(1, num_blocks + 1))]
        given = [each[start:end] for each in inputs]
        if beside is not None:
            counts, lengths = [*counts, len(beside[0])], [*lengths, len(beside[0])]
            tables.append(list(range(num_blocks + 1, 2 * num_blocks + 1)))
            given = [torch.cat(pair) for pair in zip(given, beside, strict=True)]
        yield AttentionMetadata.build(counts, lengths, tables, block_size), given, end - start
        start = end
