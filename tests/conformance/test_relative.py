"""Attention with profiles of distances has the same bits however a sequence is cut, whatever runs beside it, with any
threads, and is the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.ops.relative import relative_attention
from tests.conformance.paged import cut_steps
from tests.conformance.runtimes import LEVELS, ops

SIZE = 16
"""Tokens of a block of the cache."""
Attend = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Those of a layer, and the length of a sequence."""

    heads: int
    kv_heads: int
    dim: int
    rank: int
    extent: int
    window: int | None
    length: int


SMALL = Sizes(6, 2, 24, 3, 20, None, 75)
WINDOW = Sizes(4, 1, 16, 5, 33, 33, 150)
LONG = [Sizes(16, 2, 128, 16, 512, None, 1300), Sizes(16, 2, 64, 16, 200, 200, 1300)]
"""Of several splits, and of more items than share their keys; with fewer heads than in a release."""


def made(sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Return queries, keys, values and factors of a sequence."""
    generator, (heads, kv_heads, dim, rank, *_) = torch.Generator().manual_seed(seed), sizes
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, rank)
    return tuple(torch.randn(sizes.length, *shape, generator=generator).to(dtype) for shape in shapes)


def profiles_of(sizes: Sizes, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes.rank, sizes.extent, generator=torch.Generator().manual_seed(9)).to(dtype)


def run(
    attend: Attend, sizes: Sizes, inputs: Sequence[Tensor], cuts: Sequence[int], beside: Sequence[Tensor] | None = None
) -> Tensor:
    """Return the results of a sequence that is computed up to each of `cuts` in turn, with another one in each step.

    Blocks of the cache lie apart, as they do where several layers share a block.
    """
    num_blocks, values, dtype = -(-cuts[-1] // SIZE), SIZE * 2 * inputs[1][0].numel(), inputs[0].dtype
    cache = torch.full((2 * num_blocks + 1, 3 * values), torch.nan, dtype=dtype)[:, values : 2 * values]
    profiles, found = profiles_of(sizes, dtype), []
    for metadata, (q, k, v, factors), count in cut_steps(inputs, cuts, SIZE, beside):
        out = attend(q, (k, v), (factors, profiles), cache, metadata, 0.2, sizes.window)
        found.append(out[:count].clone())
    return torch.cat(found)


def check_bits(sizes: Sizes, dtype: torch.dtype) -> None:
    inputs, length = made(sizes, dtype), sizes.length
    other = tuple(each[: length // 2 + 3] for each in made(sizes, dtype, seed=1))
    ends = sorted({*range(1, length, 67), *range(length - 5, length + 1)})
    for level in LEVELS:
        whole = run(ops(level, 2).relative_attention, sizes, inputs, [length])
        assert whole.isfinite().all()
        for threads, given in ((1, (ends, other)), (2, (ends,)), (2, ([length], other))):
            assert torch.equal(run(ops(level, threads).relative_attention, sizes, inputs, *given), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SMALL, WINDOW], ids=["all", "window"])
def test_cuts_neighbours_and_threads_change_no_bit(sizes: Sizes, dtype: torch.dtype) -> None:
    check_bits(sizes, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", LONG, ids=["all", "window"])
def test_several_splits_change_no_bit(sizes: Sizes, dtype: torch.dtype) -> None:
    check_bits(sizes, dtype)


def test_heads_of_keys_apart_have_the_bits_of_all_together() -> None:
    """As ranks compute them."""
    sizes = SMALL
    q, k, v, factors = made(sizes)
    group = sizes.heads // sizes.kv_heads
    for level in LEVELS:
        attend = ops(level).relative_attention
        whole = run(attend, sizes, (q, k, v, factors), [sizes.length])
        for head in range(sizes.kv_heads):
            own, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
            found = run(attend, sizes, (q[:, queries], k[:, own], v[:, own], factors[:, queries]), [sizes.length])
            assert torch.equal(found, whole[:, queries])


def check_formula(sizes: Sizes, dtype: torch.dtype, tolerance: float) -> None:
    """Against the formula of one query at a time."""
    inputs = made(sizes, dtype)
    attends = [relative_attention, *(ops(level, 2).relative_attention for level in LEVELS)]
    results = [run(attend, sizes, inputs, [sizes.length]) for attend in attends]
    group, profiles = sizes.heads // sizes.kv_heads, profiles_of(sizes, dtype).double()
    q, k, v, factors = (each.double() for each in inputs)
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    for position in range(0, sizes.length, 7):
        first = 0 if sizes.window is None else max(0, position + 1 - sizes.window)
        distances = position - torch.arange(first, position + 1)
        near = torch.where(distances < sizes.extent, profiles[:, distances.clamp(max=sizes.extent - 1)], 0.0)
        scores = torch.einsum("hd,nhd->hn", q[position], k[first : position + 1]) * 0.2 + factors[position] @ near
        expected = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=1), v[first : position + 1])
        for found in results:
            torch.testing.assert_close(found[position].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("sizes", [SMALL, WINDOW], ids=["all", "window"])
def test_scores_have_products_of_factors_and_profiles(sizes: Sizes, dtype: torch.dtype, tolerance: float) -> None:
    check_formula(sizes, dtype, tolerance)


@pytest.mark.long
@pytest.mark.parametrize("sizes", LONG, ids=["all", "window"])
def test_several_splits_have_the_formula(sizes: Sizes) -> None:
    check_formula(sizes, torch.float32, 1e-5)


def test_a_key_that_the_window_has_left_behind_may_be_no_number() -> None:
    """Also one that lies in a tile with keys that are seen: its block may be gone, and another's there."""
    sizes = WINDOW
    q, k, v, factors = made(sizes)
    assert sizes.window is not None
    start, spoiled = 115, [each.clone() for each in (k, v)]
    first = start - sizes.window + 1
    for each in spoiled:
        each[first - first % 16 : first] = torch.nan
    assert first % 16
    for level in LEVELS:
        attend = ops(level).relative_attention
        expected = run(attend, sizes, (q, k, v, factors), [start, sizes.length])
        found = run(attend, sizes, (q, *spoiled, factors), [start, sizes.length])
        assert torch.equal(found[start:], expected[start:])
