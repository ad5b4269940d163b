"""Attention to compressed tokens has the same bits however a sequence is cut, beside others, and on any threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.ops import compressed
from octavo.ops.compressed import Sight, SmallQueries, compressed_windows, ends_of, store_vectors
from octavo.ops.hyper import mixed_streams, stream_mixing, stream_weights, weighed_stream
from tests.conformance.paged import cut_steps
from tests.conformance.runtimes import LEVELS, ops
from tests.conformance.test_block_sparse import threads

SIZE = 16
"""Tokens of a block of the cache."""


IMPLEMENTED: dict[str, Any] = {"reference": compressed} | {level: ops(level, 2) for level in LEVELS}
"""The references, and the kernels at every level that this machine can run."""


class Sizes(NamedTuple):
    """Of a layer, whose queries choose where `small_heads` is not 0."""

    heads: int
    dim: int
    small_heads: int
    small_dim: int
    sight: Sight
    length: int


CHOOSING = Sizes(3, 16, 4, 8, Sight(0.25, 7, 4, 5), 75)
ALL = Sizes(3, 20, 0, 0, Sight(0.25, 7, 6), 75)
ALONE = Sizes(3, 16, 0, 0, Sight(0.25, 7), 40)
RELEASED = Sizes(8, 512, 64, 128, Sight(512**-0.5, 128, 4, 40), 200)
"""Of fewer heads and choices than in a release."""
RELEASED_ALL = Sizes(8, 512, 0, 0, Sight(512**-0.5, 128, 128), 270)


class Inputs(NamedTuple):
    """Of a sequence: each [tokens, ...]. parts: what vectors are made of."""

    q: Tensor
    keys: Tensor
    parts: Tensor
    queries: Tensor
    weights: Tensor


def made(sizes: Sizes, length: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    own = 2 if sizes.small_heads else 1
    width = 2 * own * (sizes.dim + sizes.small_dim)
    shapes = (sizes.heads, sizes.dim), (sizes.dim,), (width,), (sizes.small_heads, sizes.small_dim)
    tensors = [torch.randn((length, *shape), generator=generator) for shape in (*shapes, (sizes.small_heads,))]
    return Inputs(*tensors)


def biases(sizes: Sizes) -> list[Tensor]:
    own = 2 if sizes.small_heads else 1
    dims = (sizes.dim, sizes.small_dim) if sizes.small_heads else (sizes.dim,)
    shapes = [(sizes.sight.rate, own * dim) for dim in dims]
    return [torch.linspace(-1.0, 1.0, rate * width).view(rate, width) for rate, width in shapes]


def run(
    inputs: Inputs, sizes: Sizes, cuts: Sequence[int], beside: Inputs | None = None, own: Any = compressed
) -> Tensor:
    """Return the results of a sequence that is computed up to each of `cuts` in turn, with another one in each step.

    Blocks of the caches lie apart, as they do where several layers share a block, and are full of NaN.
    """
    num_blocks, by = -(-cuts[-1] // SIZE), sizes.sight
    vectors = -(-SIZE // by.rate) if by.rate else 0
    widths = sizes.dim * SIZE, inputs.parts.shape[1] * SIZE, (sizes.dim + sizes.small_dim) * vectors
    caches = [torch.full((2 * num_blocks + 1, 2, width), torch.nan)[:, 1] for width in widths]
    found = []
    for rows, tensors, count in cut_steps(inputs, cuts, SIZE, beside):
        given = Inputs(*tensors)
        store_vectors(given.keys, caches[0], rows, 1)
        if by.rate:
            ends = ends_of(rows, by.rate)
            store_vectors(given.parts, caches[1], rows, 1)
            new = compressed_windows(caches[1], rows, ends, biases(sizes), torch.float32, by.num_chosen is not None)
            store_vectors(torch.cat(new, 1), caches[2], rows, by.rate, ends)
        small = SmallQueries(given.queries, given.weights) if sizes.small_heads else None
        used = (caches[0], caches[2]) if by.rate else caches[:1]
        sinks = torch.linspace(-1.0, 1.0, sizes.heads)
        out = own.compressed_attention(given.q, used, (rows,) * len(used), by, sinks, small)
        found.append(out[:count].clone())
    return torch.cat(found)


CUT = {"choosing": CHOOSING, "all": ALL, "alone": ALONE, "released": RELEASED, "released all": RELEASED_ALL}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # plain torch does the same at any size: with that of a released model, only in the long tests
        pytest.param(
            name, sizes, id=f"{name}-{kind}", marks=[pytest.mark.long] * (name not in LEVELS and sizes is RELEASED)
        )
        for name in IMPLEMENTED
        for kind, sizes in CUT.items()
    ],
)
def test_cuts_neighbours_and_threads_change_no_bit(sizes: Sizes, name: str) -> None:
    inputs, length, own = made(sizes, sizes.length), sizes.length, IMPLEMENTED[name]
    whole = run(inputs, sizes, [length], own=own)
    assert whole.isfinite().all()
    ends = sorted({*range(1, length, 67), *range(length - 5, length + 1)})
    assert torch.equal(run(inputs, sizes, ends, own=own), whole)
    other = made(sizes, length // 2 + 3, seed=1)
    assert torch.equal(run(inputs, sizes, ends, other, own=own), whole)
    with threads(2):
        assert torch.equal(run(inputs, sizes, ends, own=own), whole)
    if name in LEVELS:  # whose kernels had two threads so far
        assert torch.equal(run(inputs, sizes, ends, own=ops(name, 1)), whole)


@pytest.mark.parametrize("sizes", [CHOOSING, RELEASED, RELEASED_ALL, ALONE])
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_agree_with_the_reference(sizes: Sizes, level: str) -> None:
    inputs = made(sizes, sizes.length)
    expected, found = (run(inputs, sizes, [sizes.length], own=own) for own in (compressed, IMPLEMENTED[level]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_some_heads_have_the_bits_of_all_together(name: str) -> None:
    """As ranks compute them."""
    inputs, heads, own = made(RELEASED, 90), 4, IMPLEMENTED[name]
    whole, sizes = run(inputs, RELEASED, [90], own=own), RELEASED._replace(heads=heads)
    first = compressed_of_heads(inputs, sizes, heads, own)
    assert torch.equal(first, whole[:, :heads])


def compressed_of_heads(inputs: Inputs, sizes: Sizes, heads: int, own: Any) -> Tensor:
    all_sinks, by = torch.linspace(-1.0, 1.0, RELEASED.heads), sizes.sight
    rows = AttentionMetadata.build([len(inputs.q)], [len(inputs.q)], [list(range(1, 7))], SIZE)
    caches = [torch.zeros(7, width * SIZE) for width in (sizes.dim, inputs.parts.shape[1])]
    vectors = torch.zeros(7, (sizes.dim + sizes.small_dim) * SIZE // by.rate)
    store_vectors(inputs.keys, caches[0], rows, 1)
    store_vectors(inputs.parts, caches[1], rows, 1)
    ends = ends_of(rows, by.rate)
    new = compressed_windows(caches[1], rows, ends, biases(sizes), torch.float32, is_overlapping=True)
    store_vectors(torch.cat(new, 1), vectors, rows, by.rate, ends)
    small = SmallQueries(inputs.queries, inputs.weights)
    q = inputs.q[:, :heads].contiguous()
    out: Tensor = own.compressed_attention(q, (caches[0], vectors), (rows, rows), by, all_sinks[:heads], small)
    return out


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_a_query_sees_its_window_and_the_vectors_that_it_chooses(name: str) -> None:
    """Against the formula of one query at a time."""
    sizes, by = CHOOSING, CHOOSING.sight
    inputs, length = made(sizes, sizes.length), sizes.length
    found, (bias, small_bias) = run(inputs, sizes, [length], own=IMPLEMENTED[name]), biases(sizes)
    wide, narrow = 2 * sizes.dim, 2 * sizes.small_dim
    sections = inputs.parts.split([wide, wide, narrow, narrow], 1)

    def vectors(values: Tensor, gates: Tensor, bias: Tensor, dim: int) -> list[Tensor]:
        made = []
        for number in range(length // by.rate):
            now, before = (range(start * by.rate, (start + 1) * by.rate) for start in (number, number - 1))
            kept = [(values[at, dim:], gates[at, dim:] + bias[at % by.rate, dim:]) for at in now]
            kept += [(values[at, :dim], gates[at, :dim] + bias[at % by.rate, :dim]) for at in before if number]
            weights = torch.softmax(torch.stack([each for _, each in kept]), 0)
            made.append((weights * torch.stack([each for each, _ in kept])).sum(0))
        return made

    compressed = vectors(*sections[:2], bias, sizes.dim)
    keys = vectors(*sections[2:], small_bias, sizes.small_dim)
    sinks = torch.linspace(-1.0, 1.0, sizes.heads)
    for position in range(length):
        ended = (position + 1) // by.rate
        scores = [
            float((torch.relu(inputs.queries[position] @ keys[each]) * inputs.weights[position]).sum())
            for each in range(ended)
        ]
        assert by.num_chosen is not None
        best = sorted(range(ended), key=lambda each: -scores[each])[: by.num_chosen]
        seen = [*(compressed[each] for each in best), *inputs.keys[max(0, position + 1 - by.window) : position + 1]]
        both = torch.stack(seen)
        products = both @ inputs.q[position].t() * by.scale  # [vectors, heads]
        weights = torch.softmax(torch.cat((products, sinks[None])), 0)[:-1]
        torch.testing.assert_close(found[position], weights.t() @ both, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTED)
@pytest.mark.parametrize(("rate", "num_chosen"), [(4, 5), (16, 2), (1, 9), (3, 4)])
def test_the_choice_of_windows_is_that_of_the_formula_however_a_sequence_is_cut(
    rate: int, num_chosen: int, name: str
) -> None:
    length, size, heads = 90, 16, 6
    generator = torch.Generator().manual_seed(0)
    keys, gates = (torch.randn(length, size, generator=generator) for _ in range(2))
    queries = torch.randn(length, heads, size, generator=generator)
    weights, bias = (
        torch.randn(length, heads, generator=generator),
        torch.linspace(-1.0, 1.0, rate * size).view(rate, -1),
    )
    num_tokens, num_blocks = (num_chosen + 1) * rate - 1, -(-length // SIZE)

    def run(cuts: Sequence[int]) -> Tensor:
        vectors = -(-SIZE // rate)
        parts, pools = (torch.full((num_blocks + 1, n * size), torch.nan) for n in (2 * SIZE, vectors))
        found, start = [], 0
        for end in cuts:
            rows = AttentionMetadata.build([end - start], [end], [list(range(1, num_blocks + 1))], SIZE)
            store_vectors(torch.cat((keys, gates), 1)[start:end], parts, rows, 1)
            ends = ends_of(rows, rate)
            (made,) = compressed_windows(parts, rows, ends, [bias], torch.float32, is_overlapping=False)
            store_vectors(made, pools, rows, rate, ends)
            small = SmallQueries(queries[start:end], weights[start:end])
            found.append(IMPLEMENTED[name].choose_pools(small, pools, rows, rate, num_chosen, num_tokens).clone())
            start = end
        return torch.cat(found)

    whole = run([length])
    assert torch.equal(run([1, 2, 40, 41, 89, length]), whole)
    means = [
        (torch.softmax(gates[start : start + rate] + bias, 0) * keys[start : start + rate]).sum(0)
        for start in range(0, length - rate + 1, rate)
    ]
    for position in range(length):
        ended = (position + 1) // rate
        scores = [float(torch.relu(queries[position] @ means[each]) @ weights[position]) for each in range(ended)]
        best = sorted(sorted(range(ended), key=lambda each: -scores[each])[:num_chosen])
        seen = [rate * each + step for each in best for step in range(rate)] + [*range(ended * rate, position + 1)]
        assert whole[position].tolist() == seen + [-1] * (num_tokens - len(seen))


@pytest.mark.parametrize(("count", "dim"), [(4, 4096), (3, 37), (9, 11)])
def test_streams_of_a_token_depend_on_no_other_token(count: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, outputs = 29, count * (count + 2)
    x, out = (torch.randn(tokens, width, generator=generator) for width in (count * dim, dim))
    products = torch.randn(tokens, outputs, generator=generator) * 3
    scale, base = torch.tensor([0.7, 1.3, 0.9]), torch.randn(outputs, generator=generator)

    def run(rows: slice) -> list[Tensor]:
        mixing = stream_mixing(products[rows], scale, base, 20, 1e-6)
        weights = stream_weights(products[rows, :count], scale[:1], base[:count], 1e-6)
        streams = mixed_streams(x[rows], out[rows], mixing.write, mixing.mix)
        return [*mixing, weights, weighed_stream(x[rows], mixing.read), streams]

    whole = run(slice(tokens))
    torch.testing.assert_close(whole[2].sum(2), torch.ones(tokens, count), atol=0.05, rtol=0)
    for length in (1, 2, 7, 28):
        for start in range(0, tokens - length, 5):
            rows = slice(start, start + length)
            assert all(torch.equal(each, all_[rows]) for each, all_ in zip(run(rows), whole, strict=True))
    for threads_of_torch in (1, 2):
        with threads(threads_of_torch):
            assert all(torch.equal(*pair) for pair in zip(run(slice(tokens)), whole, strict=True))
