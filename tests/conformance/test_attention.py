"""Compiled attention: right by float64, and the same bits in any cut, any mixture, at any number of threads."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cpu.attention import CpuBackend
from tests.conformance.paged import Heads, Sequences, Step
from tests.conformance.runtimes import LEVELS, TYPES, runtime

CACHE_TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2.5e-2}
"""Of averages of standard normal values, against float64 over keys and values as they are stored."""

SHAPES = {
    "dim 8": Heads(dim=8, scale=0.4),
    "dim 64, one query head each": Heads(heads=3, kv_heads=3),
    "dim 80, three share": Heads(heads=6, kv_heads=2, dim=80),
    "dim 96, window": Heads(dim=96, window=37),
    "dim 128, cap": Heads(heads=8, kv_heads=2, dim=128, soft_cap=3.0),
    "dim 256, all share": Heads(heads=5, kv_heads=1, dim=256, scale=0.06),
    "dim 24, slopes": Heads(dim=24, alibi=True),
    "dim 64, sinks": Heads(heads=8, kv_heads=1, has_sinks=True, window=30),
    "latents of 24 and 8": Heads(heads=3, kv_heads=1, dim=32, value_size=24),
    "latents of 64 and 40, 20 heads": Heads(heads=20, kv_heads=1, dim=104, value_size=64, block_size=32, scale=0.1),
    "everything, blocks of 32": Heads(
        heads=6, kv_heads=3, dim=72, window=20, soft_cap=2.0, alibi=True, block_size=32, has_sinks=True
    ),
}
LENGTHS = (1, 15, 16, 17, 64, 131)


def backend(level: str, cache_dtype: torch.dtype, threads: int = 1) -> CpuBackend:
    return CpuBackend(runtime(level, threads), cache_dtype)


@cache
def drawn(shape: Heads, lengths: tuple[int, ...], dtype: torch.dtype) -> Sequences:
    return Sequences.make(shape, list(lengths), dtype)


@cache
def in_float64(shape: Heads, lengths: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> list[Tensor]:
    """What every level is compared with."""
    return drawn(shape, lengths, dtype).expected(cache_dtype)


def in_pieces(length: int, sizes: list[int]) -> list[tuple[int, int]]:
    """[start, end) of consecutive pieces that go through `sizes` round and round."""
    pieces, start = [], 0
    while start < length:
        stop = min(length, start + sizes[len(pieces) % len(sizes)])
        pieces.append((start, stop))
        start = stop
    return pieces


def one_by_one(sequences: Sequences, sizes: list[int]) -> list[Step]:
    """Every sequence alone, in pieces."""
    return [[(i, *piece)] for i, length in enumerate(sequences.lengths()) for piece in in_pieces(length, sizes)]


def side_by_side(sequences: Sequences, sizes: list[int]) -> list[Step]:
    """All sequences in the same steps, each at its own pieces, the longest first."""
    pieces = [in_pieces(length, sizes[i % len(sizes) :] + sizes) for i, length in enumerate(sequences.lengths())]
    steps = max(map(len, pieces))
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))
    return [[(i, *pieces[i][step]) for i in order if step < len(pieces[i])] for step in range(steps)]


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_those_of_float64(level: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        sequences = drawn(shape, LENGTHS, dtype)
        found = sequences.compute(backend(level, cache_dtype), sequences.whole())
        for one, other in zip(found, in_float64(shape, LENGTHS, dtype, cache_dtype), strict=True):
            assert one.dtype is dtype
            assert (one.double() - other).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_token_has_the_same_bits_in_any_mixture(level: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        sequences = Sequences.make(shape, [16, 17, 70], dtype, seed=1)
        whole = sequences.compute(backend(level, cache_dtype), sequences.whole())
        for steps in (one_by_one(sequences, [13]), side_by_side(sequences, [1, 33, 2, 15])):
            for poison in (0xFF, 0x7F):
                found = sequences.compute(backend(level, cache_dtype, 2), steps, poison)
                assert all(map(torch.equal, found, whole))


@pytest.mark.skipif(not LEVELS, reason="there are no compiled kernels")
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        # each type of queries with half of the types of caches, and with the others in the long tests
        pytest.param(dtype, cache_dtype, marks=[pytest.mark.long] * (place % len(TYPES) != turn))
        for turn, dtype in enumerate(TYPES)
        for place, cache_dtype in enumerate(CACHE_TYPES)
    ],
)
def test_long_contexts_are_cut_among_threads_without_a_trace(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    shapes = [Heads(heads=2, kv_heads=1, dim=32, window=window, has_sinks=window is None) for window in (None, 900)]
    for shape in (*shapes, Heads(heads=2, kv_heads=1, dim=40, value_size=24)):
        sequences = Sequences.make(shape, [2085, 1027], dtype, seed=2)
        # every token would take longer than all that is compared with them; 7 goes to every place of a tile
        expected = sequences.expected(cache_dtype, every=7)
        for level in LEVELS:
            whole = sequences.compute(backend(level, cache_dtype), sequences.whole())
            last: list[Step] = [[(0, 0, 2050), (1, 0, 1020)], [(0, 2050, 2084)], [(1, 1020, 1027), (0, 2084, 2085)]]
            found = sequences.compute(backend(level, cache_dtype, 2), last)
            assert all(map(torch.equal, found, whole)), level
            for one, other in zip(whole, expected, strict=True):
                assert (one[::7].double() - other).abs().max() <= TOLERANCE[dtype], level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("window", "ahead"), [(None, 2**31 - 1), (6, 5), (None, 40)])
@pytest.mark.parametrize("dtype", TYPES)
def test_queries_see_ahead_to_their_own_end(level: str, window: int | None, ahead: int, dtype: torch.dtype) -> None:
    shape = Heads(heads=3, kv_heads=3, dim=32, window=window, ahead=ahead)
    lengths = (1, 15, 17, 130, 1100)
    sequences = drawn(shape, lengths, dtype)
    made = backend(level, dtype, threads=2)
    together = sequences.compute(made, sequences.whole())
    alone = sequences.compute(made, [[(i, 0, n)] for i, n in enumerate(sequences.lengths())])
    for one, other, expected in zip(together, alone, in_float64(shape, lengths, dtype, dtype), strict=True):
        assert torch.equal(one, other)
        assert (one.double() - expected).abs().max() <= TOLERANCE[dtype]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Sequences, list[Step]]:
    """Up to four sequences and a random order of random pieces of them."""
    group, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    shape = Heads(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        dim=8 * draw(st.integers(1, 10)),
        block_size=draw(st.sampled_from([16, 48])),
        window=draw(st.sampled_from([None, 1, 20, 64])),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        alibi=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
    )
    dtype = draw(st.sampled_from(TYPES))
    sequences = Sequences.make(shape, draw(st.lists(st.integers(1, 150), min_size=1, max_size=4)), dtype)
    done, lengths = [0] * len(sequences.q), sequences.lengths()
    steps: list[Step] = []
    while open_ones := [i for i, length in enumerate(lengths) if done[i] < length]:
        step: Step = []
        for i in draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True)):
            stop = min(lengths[i], done[i] + draw(st.sampled_from([1, 2, 16, 31, 64, 150])))
            step.append((i, done[i], stop))
            done[i] = stop
        steps.append(step)
    return sequences, steps


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25)
@given(mixture=mixtures(), cache_dtype=st.sampled_from(CACHE_TYPES))
def test_mixtures_leave_no_trace(level: str, mixture: tuple[Sequences, list[Step]], cache_dtype: torch.dtype) -> None:
    sequences, steps = mixture
    whole = sequences.compute(backend(level, cache_dtype), sequences.whole())
    found = sequences.compute(backend(level, cache_dtype, 2), steps, forgets=True)
    assert all(map(torch.equal, found, whole))
    assert not any(each.isnan().any() for each in whole)


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_read_of_blocks_that_left_the_window(level: str, cache_dtype: torch.dtype) -> None:
    """Neither by what a step computes nor across the splits and chunks of long contexts."""
    for window in (1, 4, 17, 64, 65, 900):
        for dtype in TYPES:
            shape = Heads(heads=4, kv_heads=2, dim=16, window=window)
            sequences = Sequences.make(shape, [2100, 70], dtype)
            sizes = [1030, 1, 1, 16, 65, 1]
            whole = sequences.compute(backend(level, cache_dtype), sequences.whole())
            found = sequences.compute(backend(level, cache_dtype, 2), side_by_side(sequences, sizes), forgets=True)
            assert all(map(torch.equal, found, whole))
            assert not any(each.isnan().any() for each in found)


@pytest.mark.parametrize("cache_dtype", CACHE_TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_key_that_is_not_a_number_shows(level: str, cache_dtype: torch.dtype) -> None:
    for spoilt in ("k", "v", "q"):
        sequences = Sequences.make(Heads(), [40], torch.bfloat16)
        getattr(sequences, spoilt)[0][20, 0, 3] = float("nan")
        (found,) = sequences.compute(backend(level, cache_dtype), [[(0, i, i + 1)] for i in range(40)])
        assert found[20, 0].isnan().any()
        assert not found[:20].isnan().any()


@pytest.mark.parametrize("level", LEVELS)
def test_a_recorded_step_reads_lengths_tables_and_slots_when_it_runs(level: str) -> None:
    sequences = Sequences.make(Heads(), [40, 20], torch.bfloat16)
    native = backend(level, torch.bfloat16)
    whole = sequences.compute(native, sequences.whole())
    cache = torch.zeros(native.cache_shape(9, 16, 2, 64), dtype=torch.bfloat16)

    def metadata(end: int) -> AttentionMetadata:
        return AttentionMetadata.build([1, 1], [end, end], [table[:2] for table in sequences.tables], 16)

    def inputs(position: int) -> list[torch.Tensor]:
        return [torch.stack([x[position] for x in each]) for each in (sequences.q, sequences.k, sequences.v)]

    step, (q, k, v) = metadata(1), inputs(0)
    cpu = runtime(level, 1).cpu
    cpu.begin_recording()
    out = native.run(q, k, v, cache, step, Scores(0.15))
    recording = cpu.end_recording()
    for position in range(1, 20):
        for old, new in zip((q, k, v), inputs(position), strict=True):
            old.copy_(new)
        later = metadata(position + 1)
        step.sequence_lengths.copy_(later.sequence_lengths)
        step.slot_mapping.copy_(later.slot_mapping)
        recording.run()
        for row, answer in enumerate(whole):
            assert torch.equal(out[row], answer[position])
