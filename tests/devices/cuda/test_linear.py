"""Products with plain weights: the order of their sums."""

from __future__ import annotations

from itertools import product as product_of
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.attention.backend import AttentionBackend
from octavo.devices.cuda.ops import linear
from octavo.devices.cuda.runtime import CudaRuntime, launch_by_triton
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.layers.layer import Binding
from octavo.layers.linear import ColumnLinear

BACKEND: AttentionBackend = ReferenceBackend()


def product(x: Tensor, weight: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's share of x @ weight.T."""
    layer = ColumnLinear(weight.shape[1], len(weight), mesh)
    layer.bind(Binding(CudaRuntime(is_invariant=True).bind(), BACKEND))
    (slot,) = layer.tensor_slots("proj")
    slot.fill(weight)
    layer.finish()
    found: Tensor = layer(x)
    return found


def test_shares_of_a_weight_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # four programs of 32 outputs are enough, so that a share alone would have its inputs divided
    monkeypatch.setitem(linear._PROGRAMS, False, 4)
    x, weight = torch.randn(2, 512), torch.randn(128, 512)
    whole = product(x, weight, Mesh.single())
    shares = [product(x, weight, Mesh.of_rank(rank, tensor=2)) for rank in range(2)]
    assert torch.equal(torch.cat(shares, dim=1), whole)
    half = product(x, weight[:64], Mesh.single())
    assert not torch.equal(half, shares[0]), "its sums have another order"


TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("inputs", "number", "dtype"),
    [
        # each number of inputs with a type in turns, and with the others in the long tests
        pytest.param(inputs, number, dtype, marks=[pytest.mark.long] * (place % len(TYPES) != turn))
        for place, (inputs, number) in enumerate([(512, 2), (768, 2), (1024, 4), (1536, 4)])
        for turn, dtype in enumerate(TYPES)
    ],
)
def test_chunks_of_one_program_have_the_bits_of_those_of_several(inputs: int, number: int, dtype: torch.dtype) -> None:
    launched: list[tuple[str, int]] = []

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append((kernel, constants["CHUNKS"]))
        launch_by_triton(kernel, grid, *arguments, **constants)

    generator = torch.Generator().manual_seed(0)
    x, weight, add = (torch.randn(*each, generator=generator) for each in ((40, inputs), (64, inputs), (40, 64)))
    x, weight, bias = x.to(dtype), weight.to(dtype), weight[:, 0].to(dtype)
    for given in ((weight, None), (weight, bias)):
        linear = CudaRuntime(is_invariant=True, launch=launch).bind().prepare_linear(*given)
        for added in (None, add):
            many = linear(x, added)  # one program adds them one after the other
            several = linear(x[:9], None if added is None else added[:9])
            at_once = [linear(x[:rows], None if added is None else added[:rows]) for rows in (1, 8)]
            assert torch.equal(several, many[:9])
            assert all(torch.equal(each, many[: len(each)]) for each in at_once)
    if dtype is not torch.float32:
        names = ["linear.linear"] * 2 + ["linear.chunks_at_once"] * 2
        assert launched == [(name, number) for name in names] * 4


def test_tiles_fit_into_the_shared_memory_of_a_small_sm() -> None:
    for tokens, gated, dtype in product_of((1, 17, 33, 65, 2048), (False, True), (torch.bfloat16, torch.float32)):
        tile = linear.tile_of(tokens, 4096, dtype, gated=gated)
        of_inputs = tile["BK"] * dtype.itemsize * (tile["num_stages"] - 1)  # the last tile is in registers
        assert (tile["BM"] + (1 + gated) * tile["BN"]) * of_inputs <= 99 << 10, tile
    few = linear.tile_of(8, 4096, torch.bfloat16, gated=False)
    assert (few["BM"] * max(linear.AT_ONCE) + few["BN"]) * few["BK"] * 2 * (few["num_stages"] - 1) <= 99 << 10
