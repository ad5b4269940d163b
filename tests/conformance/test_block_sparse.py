"""Attention to chosen blocks has the same bits however a sequence is cut, whatever runs beside it, with any threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import StepSizes
from octavo.devices.cpu.attention import CpuBackend
from octavo.devices.cpu.ops.block_sparse import BlockSparseAttention
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops.block_sparse import BlockChoice, attend_chosen_keys, block_sparse_attention
from tests.conformance.paged import cut_steps
from tests.conformance.runtimes import LEVELS, ops, runtime

SIZE = 16
"""Tokens of a block of the cache."""
SMALL = (4, 2, 16, 8, BlockChoice(0.25, 4, 3, 1), 75)
RELEASED = (16, 2, 128, 128, BlockChoice(128**-0.5, 128, 2, 1), 300)
"""Heads, heads of keys, their size and that of small keys, the choice, and a length; half of the heads of a release."""
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
    ends = sorted({*range(1, length, 67), *range(length - 5, length + 1)})
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


class ChosenKeys(NamedTuple):
    """Sizes of attention to keys and values of chosen tokens: of the windows of `rate`, `windows` of each query."""

    heads: int
    kv_heads: int
    dim: int
    rate: int
    windows: int
    length: int

    @property
    def most(self) -> int:
        return (self.windows + 1) * self.rate - 1


CHOSEN = ChosenKeys(6, 2, 24, 3, 5, 75)
CHOSEN_RELEASED = ChosenKeys(32, 2, 128, 4, 40, 300)
"""Of fewer windows than in a release: some queries of a prompt see all tokens, in more than one item of attention."""


def chosen_of(sizes: ChosenKeys, generator: torch.Generator) -> Tensor:
    """Return what queries attend to, as of `choose_pools`: random windows and the tokens behind the last one."""
    chosen = torch.full((sizes.length, sizes.most), -1, dtype=torch.int32)
    for position in range(sizes.length):
        ended = (position + 1) // sizes.rate
        windows = torch.randperm(ended, generator=generator)[: sizes.windows].sort().values
        own = (windows[:, None] * sizes.rate + torch.arange(sizes.rate)).flatten()
        own = torch.cat((own, torch.arange(ended * sizes.rate, position + 1)))
        chosen[position, : len(own)] = own
    return chosen


def made_chosen(sizes: ChosenKeys, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Return queries, keys, values and chosen tokens of a sequence."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sizes.length, heads, sizes.dim, generator=generator).to(dtype)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    return q, k, v, chosen_of(sizes, generator)


def attends_chosen() -> list[Attend]:
    """Return the reference, and the kernels at every level that this machine can run."""
    return [attend_chosen_keys, *(ops(level, 2).attend_chosen_keys for level in LEVELS)]


def run_chosen(
    attend: Attend, inputs: Sequence[Tensor], cuts: Sequence[int], beside: Sequence[Tensor] | None = None
) -> Tensor:
    """Return what `run` does. Blocks of the cache lie apart, as they do where several layers share a block."""
    num_blocks, values = -(-cuts[-1] // SIZE), SIZE * 2 * inputs[1][0].numel()
    cache = torch.full((2 * num_blocks + 1, 3 * values), torch.nan, dtype=inputs[1].dtype)[:, values : 2 * values]
    found = []
    for metadata, (q, k, v, chosen), count in cut_steps(inputs, cuts, SIZE, beside):
        found.append(attend(q, k, v, cache, metadata, chosen, 0.2)[:count].clone())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [CHOSEN, CHOSEN_RELEASED], ids=["small", "released"])
def test_chosen_keys_have_the_same_bits_in_any_cut_beside_others_and_on_any_threads(
    sizes: ChosenKeys, dtype: torch.dtype
) -> None:
    inputs, length = made_chosen(sizes, dtype), sizes.length
    other = tuple(each[: length // 2 + 3] for each in made_chosen(sizes, dtype, seed=1))
    ends = sorted({*range(1, length, 67), *range(length - 5, length + 1)})
    for attend in attends_chosen():
        whole = run_chosen(attend, inputs, [length])
        assert whole.isfinite().all()
        for count, given in ((1, (ends, other)), (2, (ends,)), (2, ([length], other))):
            with threads(count):
                assert torch.equal(run_chosen(attend, inputs, *given), whole)
    for level in LEVELS:
        several = run_chosen(ops(level, 2).attend_chosen_keys, inputs, ends)
        assert torch.equal(run_chosen(ops(level, 1).attend_chosen_keys, inputs, ends), several)


def test_heads_of_chosen_keys_apart_have_the_bits_of_all_together() -> None:
    """As ranks compute them."""
    sizes = CHOSEN
    q, k, v, chosen = inputs = made_chosen(sizes)
    group = sizes.heads // sizes.kv_heads
    for attend in attends_chosen():
        whole = run_chosen(attend, inputs, [sizes.length])
        for head in range(sizes.kv_heads):
            own, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
            found = run_chosen(attend, (q[:, queries].contiguous(), k[:, own], v[:, own], chosen), [sizes.length])
            assert torch.equal(found, whole[:, queries])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_chosen_keys_are_what_queries_attend_to(dtype: torch.dtype, tolerance: float) -> None:
    """Against the formula of one query at a time."""
    sizes = CHOSEN_RELEASED
    q, k, v, chosen = inputs = made_chosen(sizes, dtype)
    results = [run_chosen(attend, inputs, [sizes.length]) for attend in attends_chosen()]
    k, v = (each.double().repeat_interleave(sizes.heads // sizes.kv_heads, 1) for each in (k, v))
    for position in range(0, sizes.length, 7):
        seen = chosen[position][chosen[position] >= 0].long()
        if position < sizes.most:
            seen = torch.arange(position + 1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[position].double(), k[seen]) * 0.2, dim=1)
        expected = torch.einsum("hn,nhd->hd", weights, v[seen])
        for found in results:
            torch.testing.assert_close(found[position].double(), expected, atol=tolerance, rtol=tolerance)


def test_tokens_that_a_query_has_not_chosen_may_be_no_numbers() -> None:
    sizes = CHOSEN
    q, k, v, chosen = made_chosen(sizes)
    last = chosen[-1][chosen[-1] >= 0].tolist()
    unseen = next(each for each in range(sizes.most, sizes.length) if each not in last)
    spoiled = [each.clone() for each in (k, v)]
    for each in spoiled:
        each[unseen] = torch.nan
    for attend in attends_chosen():
        expected = run_chosen(attend, (q, k, v, chosen), [sizes.length])
        found = run_chosen(attend, (q, *spoiled, chosen), [sizes.length])
        assert found[unseen].isnan().all()
        assert torch.equal(found[-1], expected[-1])


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_the_memory_plan_counts_the_tiles_of_one_head_of_keys_for_each_thread() -> None:
    own, heads, kv_heads, dim, num_keys = CpuRuntime.open(2), 32, 2, 128, 500
    sizes = StepSizes(40, num_keys, heads, kv_heads, dim, 4)
    counted = CpuBackend(own, torch.float32).gathered_bytes(sizes, num_keys)
    tiles = 2 * 512 * 2 * dim * 4
    assert tiles < counted < tiles + 2 * own.cpu.attention_scratch_bytes(heads, kv_heads, dim, 0, num_keys, 0)
