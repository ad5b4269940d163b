"""The reference backend against attention written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.attention.backend import Scores, StepSizes
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.reference import attention as reference
from octavo.devices.reference.attention import ReferenceBackend
from tests.attention.rows import Rows, attend_slowly, make_rows
from tests.conformance.paged import Heads, Sequences
from tests.fakes.exact_products import need_exact_products

MIXED = [(0, 7), (9, 1), (5, 6), (31, 1), (0, 1), (0, 16), (16, 3)]
SHAPES = {
    "prefill of one": [(0, 13)],
    "prefill of two": [(0, 13), (0, 4)],
    "a chunk after context": [(11, 9)],
    "decode of one": [(12, 1)],
    "decode of equal lengths": [(7, 1), (7, 1), (7, 1)],
    "decode of unequal lengths": [(3, 1), (40, 1), (0, 1)],
    "everything at once": MIXED,
}


def run(rows: Rows, **options: object) -> torch.Tensor:
    return ReferenceBackend().run(rows.q, rows.k, rows.v, rows.cache, rows.metadata, Scores(0.3, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 2, 8, 4), (3, 3, 5, 16), (6, 1, 16, 3)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_mixture_of_rows_sees_its_own_past(
    shape: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int, window: int | None
) -> None:
    rows = make_rows(shape, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    torch.testing.assert_close(run(rows, sliding_window=window), attend_slowly(rows, 0.3, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_slopes_and_soft_caps_bend_the_scores(window: int | None, soft_cap: float | None) -> None:
    rows = make_rows(MIXED, heads=4, kv_heads=2, dim=8, block_size=4)
    alibi = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    found = run(rows, sliding_window=window, soft_cap=soft_cap, alibi=alibi)
    torch.testing.assert_close(found, attend_slowly(rows, 0.3, window, soft_cap, alibi), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_sinks_take_a_share_of_the_weights(window: int | None) -> None:
    rows = make_rows(MIXED, heads=4, kv_heads=2, dim=8, block_size=4)
    sinks = torch.tensor([-2.0, 0.0, 1.5, 9.0])
    found = run(rows, sliding_window=window, sinks=sinks)
    torch.testing.assert_close(found, attend_slowly(rows, 0.3, window, sinks=sinks), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_row_has_the_same_bits_alone_and_beside_longer_ones(dtype: torch.dtype, window: int | None) -> None:
    need_exact_products(dtype)
    lengths = [3, 61, 200, 33, 515, 1]
    rows = make_rows([(n, 1) for n in lengths], heads=4, kv_heads=2, dim=16, block_size=4, dtype=dtype)
    together = run(rows, sliding_window=window)
    for i, length in enumerate(lengths):
        alone = AttentionMetadata.build([1], [length + 1], [rows.metadata.block_tables[i].tolist()], 4)
        one = slice(i, i + 1)
        found = ReferenceBackend().run(rows.q[one], rows.k[one], rows.v[one], rows.cache, alone, Scores(0.3, window))
        assert torch.equal(found[0], together[i])


@pytest.mark.parametrize("bends", [{}, {"soft_cap": 2.0}, {"sinks": torch.linspace(-1.0, 2.0, 6)}], ids=str)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_a_whole_prefill_in_any_piece_and_in_a_decode_step(
    dtype: torch.dtype, window: int | None, bends: dict[str, Any]
) -> None:
    need_exact_products(dtype)
    rows = make_rows([(0, 150)], heads=6, kv_heads=2, dim=16, block_size=4, dtype=dtype)
    whole = run(rows, sliding_window=window, **bends)
    table = rows.metadata.block_tables[0].tolist()
    for size in (1, 3, 17, 64):
        for start in range(0, 150, max(size, 13)):
            stop = min(start + size, 150)
            piece = AttentionMetadata.build([stop - start], [stop], [table], 4)
            here = slice(start, stop)
            found = ReferenceBackend().run(
                rows.q[here], rows.k[here], rows.v[here], rows.cache, piece, Scores(0.3, window, **bends)
            )
            assert torch.equal(found, whole[here])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_nothing_is_read_of_blocks_that_left_the_window(cache_dtype: torch.dtype, soft_cap: float | None) -> None:
    """They are full of NaN, the null block in their place too: a weight of zero would not hide it."""
    backend = ReferenceBackend(cache_dtype)
    for window, block_size in ((1, 4), (4, 16), (17, 4), (37, 8), (64, 16)):
        shape = Heads(dim=16, window=window, soft_cap=soft_cap, block_size=block_size)
        sequences = Sequences.make(shape, [150, 90], torch.float32)
        steps = [[(0, 0, 70), (1, 0, 1)], [(0, 70, 71), (1, 1, 60)], [(0, 71, 149)], [(0, 149, 150), (1, 60, 90)]]
        kept, found = (sequences.compute(backend, steps, forgets=forgets) for forgets in (False, True))
        assert all(map(torch.equal, found, kept))
        assert not any(each.isnan().any() for each in found)


def test_this_steps_keys_and_values_are_in_the_cache_afterwards() -> None:
    rows = make_rows(MIXED, heads=4, kv_heads=2, dim=8, block_size=4)
    run(rows)
    slots = rows.metadata.slot_mapping
    for plane, expected in ((0, rows.k), (1, rows.v)):
        stored = rows.cache[plane].permute(0, 2, 1, 3).reshape(-1, 2, 8)[slots]
        assert torch.equal(stored, expected)


def test_slots_of_others_are_left_alone() -> None:
    rows = make_rows(MIXED, heads=4, kv_heads=2, dim=8, block_size=4)
    before = rows.cache.clone()
    run(rows)
    untouched = torch.ones(rows.cache.shape[1] * 4, dtype=torch.bool)
    untouched[rows.metadata.slot_mapping] = False
    slots = [each.permute(0, 1, 3, 2, 4).reshape(2, -1, 2, 8)[:, untouched] for each in (before, rows.cache)]
    assert torch.equal(*slots)


def test_all_layers_of_a_step_share_the_plan() -> None:
    rows = make_rows(MIXED, heads=4, kv_heads=2, dim=8, block_size=4)
    first = run(rows)
    plans = dict(rows.metadata.derived)
    second = run(rows)
    assert torch.equal(first, second)
    assert rows.metadata.derived.keys() == plans.keys()
    assert all(rows.metadata.derived[key] is plan for key, plan in plans.items())


@pytest.mark.parametrize("window", [None, 5])
def test_large_steps_are_cut_without_changing_the_answer(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    shape = [(30, 20), (3, 1), (0, 11), (40, 1), (9, 1), (12, 1), (8, 1)]
    rows = make_rows(shape, heads=4, kv_heads=2, dim=8, block_size=4)
    monkeypatch.setattr(reference, "_GATHERED_TOKENS", 30)
    monkeypatch.setattr(reference, "_MASK_ELEMENTS", 60)
    found = run(rows, sliding_window=window)
    assert len(rows.metadata.derived["pieces", window, False, 0]) > len(shape)
    torch.testing.assert_close(found, attend_slowly(rows, 0.3, window), atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_close_to_float64() -> None:
    rows = make_rows(MIXED, heads=4, kv_heads=2, dim=16, block_size=4, dtype=torch.bfloat16)
    found = run(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), attend_slowly(rows, 0.3), atol=2e-2, rtol=2e-2)


def test_the_plan_of_workspace_grows_with_what_it_counts() -> None:
    sizes = StepSizes(max_tokens=2048, max_length=4096, num_heads=16, kv_heads=8, head_dim=64, element_size=2)
    base = ReferenceBackend().workspace_bytes(sizes)
    # the gathered keys and values alone
    assert base > 16_384 * 2 * 8 * 64 * 2
    longer = ReferenceBackend().workspace_bytes(sizes._replace(max_length=65_536))
    assert longer - base >= (65_536 - 16_384) * 2 * 8 * 64 * 2
