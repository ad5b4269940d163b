"""Products with plain weights: the order of their sums."""

from __future__ import annotations

from itertools import product as product_of

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.attention.backend import AttentionBackend
from octavo.devices.cuda.ops import linear
from octavo.devices.cuda.runtime import CudaRuntime
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


def test_tiles_fit_into_the_shared_memory_of_a_small_sm() -> None:
    for tokens, gated, dtype in product_of((1, 17, 33, 65, 2048), (False, True), (torch.bfloat16, torch.float32)):
        tile = linear.tile_of(tokens, 4096, dtype, gated=gated)
        of_inputs = tile["BK"] * dtype.itemsize * (tile["num_stages"] - 1)  # the last tile is in registers
        assert (tile["BM"] + (1 + gated) * tile["BN"]) * of_inputs <= 99 << 10, tile
