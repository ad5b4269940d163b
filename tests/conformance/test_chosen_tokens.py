"""Attention to chosen tokens has the same bits however a sequence is cut, whatever runs beside it, with any threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import StepSizes
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cpu.attention import CpuBackend
from octavo.devices.cpu.dry_library import DryLibrary
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops.chosen_tokens import SmallHeads, attend_chosen, choose_tokens
from tests.conformance.paged import cut_steps
from tests.conformance.runtimes import LEVELS, ops
from tests.conformance.test_block_sparse import threads

SIZE = 16
"""Tokens of a block of the cache."""


class Sizes(NamedTuple):
    heads: int
    value: int
    rest: int
    index_heads: int
    index: int
    count: int
    length: int


SMALL = Sizes(4, 24, 8, 6, 8, 12, 75)
LARGER = Sizes(12, 96, 64, 64, 128, 40, 80)
"""The second has the small heads of a release."""
Inputs = tuple[Tensor, ...]
Both = tuple[Callable[..., Tensor], Callable[..., Tensor]]
"""Choice and attention."""


def made(sizes: Sizes, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return both parts of queries and of latents of a sequence, and small queries, weights and keys."""
    generator, length = torch.Generator().manual_seed(seed), sizes.length
    shapes = (
        *((length, sizes.heads, sizes.value), (length, sizes.heads, sizes.rest)),
        *((length, sizes.value), (length, sizes.rest)),
        *((length, sizes.index_heads, sizes.index), (length, sizes.index_heads), (length, sizes.index)),
    )
    *others, weights, keys = (torch.randn(shape, generator=generator) for shape in shapes)
    return *(each.to(dtype) for each in others), weights, keys.to(dtype)


def run(
    both: Both,
    inputs: Inputs,
    sizes: Sizes,
    cuts: Sequence[int],
    beside: Inputs | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of a sequence that is computed up to each of `cuts` in turn, with another one in each step,
    and what it chose."""
    num_blocks = -(-cuts[-1] // SIZE)
    num_values = sizes.value + sizes.rest + sizes.index
    cache = torch.full((2 * num_blocks + 1, SIZE * num_values), torch.nan, dtype=inputs[0].dtype)
    cache[0] = 0.0
    found, chose = [], []
    for metadata, given, count in cut_steps(inputs, cuts, SIZE, beside):
        chosen = both[0](SmallHeads(*given[4:]), cache, metadata, sizes.count)
        out = both[1]((given[0], given[1]), (given[2], given[3]), cache, metadata, chosen, 0.1, sinks)
        found.append(out[:count].clone())
        chose.append(chosen[:count].clone())
    return torch.cat(found), torch.cat(chose)


def all_of_both() -> list[Both]:
    """Return the references, and the kernels at every level that this machine can run."""
    bound = [(ops(level, 2).choose_tokens, ops(level, 2).attend_chosen) for level in LEVELS]
    return [(choose_tokens, attend_chosen), *bound]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [SMALL, LARGER], ids=["small", "larger"])
def test_cuts_neighbours_and_threads_change_no_bit(sizes: Sizes, dtype: torch.dtype, has_sinks: bool) -> None:
    sinks = torch.linspace(-1.0, 2.0, sizes.heads) if has_sinks else None
    inputs, length = made(sizes, dtype=dtype), sizes.length
    other = tuple(each[: length // 2 + 3] for each in made(sizes, seed=1, dtype=dtype))
    ends = sorted({*range(1, length, 67), *range(length - 5, length + 1)})
    for both in all_of_both():
        whole, chosen = run(both, inputs, sizes, [length], sinks=sinks)
        assert whole.isfinite().all()
        for count, given in ((1, (ends, other)), (2, (ends,)), (2, ([length], other))):
            with threads(count):
                again, chosen_again = run(both, inputs, sizes, *given, sinks=sinks)
            assert torch.equal(chosen_again, chosen)
            assert torch.equal(again, whole)


def test_a_query_attends_to_the_best_tokens_and_of_equal_ones_to_the_first() -> None:
    """Against the formula of one query at a time. Half of the keys stand twice, and many scores are zero."""
    sizes = SMALL._replace(index_heads=2)
    q, q_rest, latents, rest, small, weights, keys = made(sizes)
    keys[1::2] = keys[::2][: len(keys[1::2])]
    inputs = q, q_rest, latents, rest, small, weights, keys
    results = [run(both, inputs, sizes, [sizes.length]) for both in all_of_both()]
    num_equal = 0
    for position in range(sizes.length):
        scores = torch.relu(keys[: position + 1].double() @ small[position].double().t()) @ weights[position].double()
        order = sorted(range(position + 1), key=lambda each: (-float(scores[each]), each))
        places = sorted(order[: sizes.count])
        num_equal += len(order) > len(places) and scores[order[sizes.count]] == scores[order[sizes.count - 1]]
        full = torch.cat((latents, rest), dim=1)[places]
        query = torch.cat((q[position], q_rest[position]), dim=1)
        expected = torch.softmax(query @ full.t() * 0.1, dim=1) @ latents[places]
        for found, chosen in results:
            assert sorted(set(chosen[position].tolist())) == places
            torch.testing.assert_close(found[position], expected, atol=1e-5, rtol=1e-5)
    assert num_equal > 10


def test_a_score_that_is_no_number_changes_no_other_sequence() -> None:
    spoiled, fine = made(SMALL), made(SMALL, seed=1)
    spoiled[5][20:] = torch.nan
    for both in all_of_both():
        expected, _ = run(both, fine, SMALL, [SMALL.length])
        found, chosen = run(both, fine, SMALL, [SMALL.length], spoiled)
        assert torch.equal(found, expected)
        assert torch.equal(chosen.sort(dim=1).values, chosen)


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_the_memory_plan_counts_what_kernels_work_in() -> None:
    runtime, sizes, tokens = CpuRuntime.open(2), LARGER, 40
    library = DryLibrary(runtime.cpu)
    dry = CpuRuntime(cast(Any, library), "meta").bind()
    shapes = (tokens, sizes.index_heads, sizes.index), (tokens, sizes.index_heads), (tokens, sizes.index)
    small = SmallHeads(*(torch.empty(shape, device="meta") for shape in shapes))
    cache = torch.empty(9, SIZE * (sizes.value + sizes.rest + sizes.index), device="meta")
    dry.choose_tokens(small, cache, AttentionMetadata.build([tokens], [tokens], [list(range(1, 4))], SIZE), sizes.count)
    assert library.scratch_bytes == 2 * 4 * 16 * (sizes.index_heads + 1) * sizes.index
    size = sizes.value + sizes.rest
    counted = CpuBackend(runtime, torch.float32).gathered_bytes(
        StepSizes(tokens, 500, sizes.heads, 1, size, 4, sizes.value), 500
    )
    tiles = 2 * 512 * size * 4
    assert tiles < counted < tiles + runtime.cpu.attention_scratch_bytes(sizes.heads, 1, size, sizes.value, 500, 0) * 2
