"""Attention to chosen blocks has the same bits however a sequence is cut, whatever runs beside it, with any threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from octavo.devices.cpu.ops.block_sparse import BlockSparseAttention
from octavo.ops.block_sparse import BlockChoice, block_sparse_attention
from tests.conformance.paged import cut_steps
from tests.conformance.runtimes import LEVELS, runtime

SIZE = 16
"""Tokens of a block of the cache."""
SMALL = (4, 2, 16, 8, BlockChoice(0.25, 4, 3, 1), 75)
RELEASED = (32, 4, 128, 128, BlockChoice(128**-0.5, 128, 2, 1), 540)
"""Heads, heads of keys, their size and that of small keys, the choice, and a length; the first as in a release."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Attend = Callable[..., Tensor]


def made(sizes: tuple[int, int, int, int, BlockChoice, int], seed: int = 0) -> Inputs:
    """Return queries, keys, values, and small queries and keys of a sequence."""
    heads, kv_heads, dim, size, _, length = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim), (length, kv_heads, size)
    q, k, v, small = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v, small, torch.randn(length, size, generator=generator)


def attends() -> list[Attend]:
    """Return the reference, and the kernels at every level that this machine can run."""
    return [block_sparse_attention, *(BlockSparseAttention(runtime(level, 2)) for level in LEVELS)]


def run(attend: Attend, inputs: Inputs, by: BlockChoice, cuts: Sequence[int], beside: Inputs | None = None) -> Tensor:
    """Return the results of a sequence that is computed up to each of `cuts` in turn, with another one in each step."""
    length = cuts[-1]
    num_blocks = -(-length // SIZE)
    values = 2 * inputs[1][0].numel() + inputs[4].shape[1]
    cache = torch.full((2 * num_blocks + 1, SIZE * values), torch.nan)
    cache[0] = 0.0
    found = []
    for metadata, (q, k, v, small, keys), count in cut_steps(inputs, cuts, SIZE, beside):
        found.append(attend(q, k, v, (small, keys), cache, metadata, by)[:count].clone())
    return torch.cat(found)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [SMALL, RELEASED], ids=["small", "released"])
def test_cuts_neighbours_and_threads_change_no_bit(sizes: tuple[int, int, int, int, BlockChoice, int]) -> None:
    inputs, by, length = made(sizes), sizes[4], sizes[5]
    ends = sorted({*range(1, length, 67), *range(length - 9, length + 1)})
    other: Inputs = tuple(each[: length // 2 + 3] for each in made(sizes, seed=1))  # type: ignore[assignment]
    for attend in attends():
        whole = run(attend, inputs, by, [length])
        assert whole.isfinite().all()
        for count, beside in ((1, other), (2, None)):
            with threads(count):
                assert torch.equal(run(attend, inputs, by, ends, beside), whole)


def test_heads_of_keys_apart_have_the_bits_of_all_together() -> None:
    """As ranks compute them."""
    heads, kv_heads, *_, by, length = SMALL
    q, k, v, small, keys = made(SMALL)
    group = heads // kv_heads
    for attend in attends():
        whole = run(attend, (q, k, v, small, keys), by, [length])
        for head in range(kv_heads):
            own = slice(head, head + 1)
            queries = slice(head * group, (head + 1) * group)
            found = run(attend, (q[:, queries], k[:, own], v[:, own], small[:, own], keys), by, [length])
            assert torch.equal(found, whole[:, queries])


def test_a_query_sees_the_best_blocks_and_the_last_ones() -> None:
    """Against the formula of one query at a time."""
    heads, kv_heads, _, _, by, length = SMALL
    q, k, v, small, keys = inputs = made(SMALL)
    results = [run(attend, inputs, by, [length]) for attend in attends()]
    for position in range(length):
        seen = position // by.width + 1
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = keys[: position + 1] @ small[position, own]
            best = [float(scores[block * by.width : (block + 1) * by.width].max()) for block in range(seen)]
            order = sorted(range(seen), key=lambda block: (block != seen - 1, -best[block]))[: by.num_chosen]
            places = [each for each in range(position + 1) if each // by.width in order]
            weights = torch.softmax(k[places, own] @ q[position, head] * by.scale, dim=0)
            for found in results:
                torch.testing.assert_close(found[position, head], weights @ v[places, own], atol=1e-5, rtol=1e-5)
