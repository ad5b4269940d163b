"""Compiled attention by distance: right by the reference, and the same bits whatever prompts stand beside one."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.distance import disentangled_attention, distance_attention
from tests.conformance.runtimes import TYPES, levels_of, ops

LENGTHS = [1, 15, 64, 65, 131, 16]
"""Of a tile and of a chunk of keys, and beside them."""


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", levels_of("attention"))
@pytest.mark.parametrize(("heads", "dim", "reach", "lengths"), [(3, 24, 30, LENGTHS), (1, 64, 200, [7, 1100])])
def test_a_prompt_has_the_same_bits_alone(
    level: str, dtype: torch.dtype, heads: int, dim: int, reach: int, lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(dim)
    wide = torch.randn((sum(lengths), 3 * heads, dim), generator=generator).to(dtype)
    biases = torch.randn((heads, 2 * reach + 1), generator=generator) * 2
    q, k, v = wide.split(heads, dim=1)
    whole = ops(level).distance_attention(q, k, v, biases, lengths, dim**-0.5).clone()
    assert torch.equal(whole, ops(level, 2).distance_attention(q, k, v, biases, lengths, dim**-0.5))
    want = distance_attention(*(each.float() for each in (q, k, v)), biases, lengths, dim**-0.5)
    tolerance = 2e-5 if dtype is torch.float32 else 2.5e-2
    torch.testing.assert_close(whole.float(), want, rtol=tolerance, atol=tolerance)
    for own, alone in zip(wide.split(lengths), whole.split(lengths), strict=True):
        found = ops(level).distance_attention(*own.split(heads, dim=1), biases, [len(own)], dim**-0.5)
        assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", levels_of("attention"))
@pytest.mark.parametrize(("heads", "dim", "lengths"), [(3, 24, LENGTHS), (1, 64, [7, 1100])])
def test_a_prompt_with_vectors_of_distances_has_the_same_bits_alone(
    level: str, dtype: torch.dtype, heads: int, dim: int, lengths: list[int]
) -> None:
    generator, reach = torch.Generator().manual_seed(dim), max(lengths) + 5
    wide = torch.randn((sum(lengths), 3 * heads, dim), generator=generator).to(dtype)
    places = tuple(torch.randn((2, 75, heads, dim), generator=generator).to(dtype))
    rows = torch.arange(-reach, reach + 1).clamp(-37, 37) + 37
    others = places, rows
    whole = ops(level).disentangled_attention(wide.split(heads, dim=1), *others, lengths, dim**-0.5).clone()
    again = ops(level, 2).disentangled_attention(wide.split(heads, dim=1), *others, lengths, dim**-0.5)
    assert torch.equal(whole, again)
    exact = wide.float().split(heads, dim=1), tuple(each.float() for each in places), rows
    tolerance = 5e-5 if dtype is torch.float32 else 2.5e-2
    want = disentangled_attention(*exact, lengths, dim**-0.5)
    torch.testing.assert_close(whole.float(), want, rtol=tolerance, atol=tolerance)
    near = slice(reach + 1 - 131, reach + 131)
    for own, alone in zip(wide.split(lengths), whole.split(lengths), strict=True):
        own_rows = rows if len(own) > 131 else rows[near]
        found = ops(level).disentangled_attention(own.split(heads, dim=1), places, own_rows, [len(own)], dim**-0.5)
        assert torch.equal(found, alone)


@pytest.mark.long
def test_prompts_with_more_scores_than_32_bits_count_have_vectors_of_distances() -> None:
    length, dim, generator = 46_500, 16, torch.Generator().manual_seed(1)
    assert length**2 > 1 << 31
    q, k, v = torch.randn((3, length, 1, dim), generator=generator)
    places = tuple(torch.randn((2, 3, 1, dim), generator=generator))
    rows = torch.arange(-length, length + 1).clamp(-1, 1) + 1
    found = ops(levels_of("attention")[-1]).disentangled_attention((q, k, v), places, rows, [length], dim**-0.5)
    for query in (0, length - 1):
        place_q, place_k = (each[rows[length + query - torch.arange(length)], 0] for each in places)
        scores = k[:, 0] @ q[query, 0] + place_k @ q[query, 0] + (place_q * k[:, 0]).sum(1)
        torch.testing.assert_close(found[query, 0], (scores * dim**-0.5).softmax(0) @ v[:, 0], rtol=1e-4, atol=1e-4)
