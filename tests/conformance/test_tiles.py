"""Products of tiles against Intel's manual, step by step: the software model, and the processor where it has tiles."""

from __future__ import annotations

from fractions import Fraction
from math import frexp

import pytest
import torch
from torch import Tensor

from tests.conformance.runtimes import LEVELS, runtime

TILE_LEVELS = [level for level in LEVELS if level.startswith("amx")]
SHAPES = ((16, 16, 16), (1, 16, 16), (16, 3, 5), (7, 9, 1))

BF16, INT8, UINT8_INT8, INT8_UINT8 = 0, 1, 2, 3


def multiply(level: str, kind: int, c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c [rows, columns] + a [rows, depth, lanes] · b [depth, columns, lanes], by one instruction."""
    out = c.clone()
    rows, columns = c.shape
    runtime(level).cpu.tile_dot(out.data_ptr(), a.data_ptr(), b.data_ptr(), rows, columns, a.shape[1], kind)
    return out


def flushed(value: float) -> Fraction:
    """Denormal numbers are read as zero."""
    return Fraction(value) if abs(value) >= 2.0**-126 else Fraction(0)


def rounded(value: Fraction) -> Fraction:
    """To the nearest float32, ties to even; what is too small for a normal number becomes zero."""
    if not value:
        return value
    unit = Fraction(2) ** (frexp(value)[1] - 24)
    nearest = round(value / unit) * unit
    return nearest if abs(nearest) >= Fraction(2) ** -126 else Fraction(0)


def by_the_manual(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """TDPBF16PS: even and odd elements are summed apart from zero, and their sum is added to c."""
    out = torch.empty_like(c)
    for row in range(c.shape[0]):
        for column in range(c.shape[1]):
            sums = [Fraction(0), Fraction(0)]
            for k in range(a.shape[1]):
                for lane in (0, 1):
                    product = flushed(a[row, k, lane].item()) * flushed(b[k, column, lane].item())
                    sums[lane] = rounded(sums[lane] + product)
            out[row, column] = float(rounded(flushed(c[row, column].item()) + rounded(sums[0] + sums[1])))
    return out


@pytest.mark.parametrize("scale", [1.0, 2.0**-63], ids=["ordinary", "products_near_the_least_normal_number"])
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("level", TILE_LEVELS)
def test_bfloat16_tiles_round_as_the_manual_says(level: str, rows: int, columns: int, depth: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(rows + columns + depth)
    a, b = (
        (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16)
        for shape in ((rows, depth, 2), (depth, columns, 2))
    )
    c = torch.randn(rows, columns, generator=generator) * scale**2
    assert torch.equal(multiply(level, BF16, c, a, b), by_the_manual(c, a, b))


@pytest.mark.parametrize("level", TILE_LEVELS)
def test_denormal_numbers_count_as_zero(level: str) -> None:
    denormal, one = 2.0**-130, 1.0
    a = torch.tensor([[[denormal, one]]]).to(torch.bfloat16)
    b = torch.tensor([[[one, one]]]).to(torch.bfloat16)
    assert multiply(level, BF16, torch.zeros(1, 1), a, b).item() == 1.0
    assert multiply(level, BF16, torch.full((1, 1), denormal), a * 0, b).item() == 0.0


@pytest.mark.parametrize("level", TILE_LEVELS)
def test_nan_and_infinity_stay_in_their_row(level: str) -> None:
    a, b, c = torch.ones(3, 2, 2).to(torch.bfloat16), torch.ones(2, 4, 2).to(torch.bfloat16), torch.zeros(3, 4)
    a[0, 1, 0], a[1, 0, 1] = float("nan"), float("inf")
    out = multiply(level, BF16, c, a, b)
    assert out[0].isnan().all()
    assert out[1].isinf().all()
    assert torch.equal(out[2], torch.full((4,), 4.0))


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        (INT8, torch.int8, torch.int8),
        (UINT8_INT8, torch.uint8, torch.int8),
        (INT8_UINT8, torch.int8, torch.uint8),
    ],
    ids=["int8", "uint8_int8", "int8_uint8"],
)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("level", TILE_LEVELS)
def test_products_of_bytes_are_exact(
    level: str, rows: int, columns: int, depth: int, kind: int, left: torch.dtype, right: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(depth)
    a = torch.randint(0, 256, (rows, depth, 4), generator=generator).to(torch.uint8).view(left)
    b = torch.randint(0, 256, (depth, columns, 4), generator=generator).to(torch.uint8).view(right)
    c = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32)
    # int64 sums cut to 32 bits: they wrap
    expected = (c.long() + torch.einsum("rdl,dcl->rc", a.long(), b.long())).to(torch.int32)
    assert torch.equal(multiply(level, kind, c, a, b), expected)


@pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
def test_levels_without_tiles_refuse_them() -> None:
    c = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="level avx2 has no tiles"):
        runtime("avx2").cpu.tile_dot(c.data_ptr(), c.data_ptr(), c.data_ptr(), 1, 1, 1, BF16)
