"""Linear layers: which tensors they read, where these go, and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.embedding import LMHead
from octavo.layers.heads import Heads
from octavo.layers.latent import LatentHeads, LatentQueries
from octavo.layers.layer import Binding, PreparedLayer
from octavo.layers.linear import ColumnLinear, GatedLinear, QKVLinear, SummedLinear, joined_linear
from octavo.layers.picked import GatedQKVLinear
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import bind
from tests.distributed.threads import run_on, thread_meshes
from tests.layers.bound import apart, fill, random

ONE = Mesh.single()
RANKS = (apart(0, 2), apart(1, 2))
X = random(3, 8)


def test_a_linear_layer_reads_its_own_name() -> None:
    weight, bias = random(6, 8), random(6)
    layer = fill(ColumnLinear(8, 6, ONE, bias=True), {"layers.0.part.weight": weight, "layers.0.part.bias": bias})
    torch.testing.assert_close(layer(X), X @ weight.T + bias)


def test_named_tensors_are_read_from_beside_the_layer_and_stacked() -> None:
    gate, up = random(6, 8), random(4, 8)
    layer = fill(
        ColumnLinear(8, (6, 4), ONE, reads=("gate", "up")), {"layers.0.gate.weight": gate, "layers.0.up.weight": up}
    )
    torch.testing.assert_close(layer(X), torch.cat((X @ gate.T, X @ up.T), dim=1))


def test_the_gate_comes_before_what_it_gates() -> None:
    gate, up = random(6, 8), random(6, 8) + 1
    stored = {"layers.0.gate_proj.weight": gate, "layers.0.up_proj.weight": up}
    torch.testing.assert_close(fill(GatedLinear(8, 6, ONE), stored)(X), F.silu(X @ gate.T) * (X @ up.T))
    shares = [fill(GatedLinear(8, 6, mesh), stored)(X) for mesh in RANKS]
    torch.testing.assert_close(torch.cat(shares, dim=1), fill(GatedLinear(8, 6, ONE), stored)(X))


def test_a_finished_layer_is_restored_from_its_state_without_its_tensors() -> None:
    layer = fill(
        ColumnLinear(8, 6, ONE, bias=True), {"layers.0.part.weight": random(6, 8), "layers.0.part.bias": X[0, :6]}
    )
    ops = bind()
    with torch.device("meta"):
        again = ColumnLinear(8, 6, ONE, bias=True)
    specs = again.state_specs(ops)
    assert specs == {name: TensorSpec.of(tensor) for name, tensor in layer.state().items()}
    again.bind(Binding(ops, ReferenceBackend()))
    again.restore(layer.state())
    assert torch.equal(again(X), layer(X))
    assert list(again.parameters()) == list(layer.parameters()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: ColumnLinear(8, (6, 4), mesh),
        lambda mesh: QKVLinear(8, Heads(query=4, kv=1, dim=3), mesh),
        lambda mesh: GatedQKVLinear(8, Heads(query=4, kv=1, dim=3), mesh),
        lambda mesh: joined_linear(8, 6, mesh),
        lambda mesh: LMHead(8, 7, mesh),
        lambda mesh: LatentQueries(8, LatentHeads(count=2, plain=3, turned=2, value=3, latent=4), mesh),
    ],
    ids=["columns", "qkv", "gated qkv", "joined", "head", "latent queries"],
)
def test_formats_know_the_outputs_of_all_ranks(make: Callable[[Mesh], PreparedLayer]) -> None:
    """On which the order of sums may depend, but not on those of one rank."""
    whole, share = make(ONE), make(RANKS[1])
    for layer in (whole, share):
        layer.bind(Binding(bind(), ReferenceBackend()))
        layer.restore({name: torch.zeros(spec.shape) for name, spec in layer.state_specs(bind()).items()})
    assert whole.prepared.shape.all_outputs == whole.num_outputs > share.num_outputs
    assert share.prepared.shape.all_outputs == whole.num_outputs


def test_a_layer_at_the_root_reads_from_the_root() -> None:
    names = [slot.name for slot in ColumnLinear(8, 6, ONE).tensor_slots("project_in")]
    assert names == ["project_in.weight"]


def test_transposed_tensors_are_turned() -> None:
    column = fill(ColumnLinear(8, 6, ONE, transposed=True), {"layers.0.part.weight": random(8, 6)})
    torch.testing.assert_close(column(X), X @ random(8, 6))
    row = fill(SummedLinear(8, 6, ONE, transposed=True), {"layers.0.part.weight": random(8, 6)})
    torch.testing.assert_close(row(X), X @ random(8, 6))


@pytest.mark.parametrize("fused", [False, True])
def test_queries_keys_and_values_are_views_by_head(fused: bool) -> None:
    heads = Heads(query=4, kv=2, dim=3)
    parts = [random(12, 8), random(6, 8), random(6, 8) + 1]
    names = ("c_attn",) if fused else ("q_proj", "k_proj", "v_proj")
    stored = [torch.cat(parts)] if fused else parts
    layer = fill(
        QKVLinear(8, heads, ONE, reads=names),
        {f"layers.0.{name}.weight": tensor for name, tensor in zip(names, stored, strict=True)},
    )
    found = layer(X)
    for each, part, count in zip(found, parts, (4, 2, 2), strict=True):
        torch.testing.assert_close(each, (X @ part.T).view(3, count, 3))
    assert len({each.untyped_storage().data_ptr() for each in found}) == 1


def test_ranks_share_columns_section_by_section() -> None:
    stored = {"layers.0.a.weight": random(4, 8), "layers.0.b.weight": random(6, 8), "layers.0.a.bias": random(4)}
    stored["layers.0.b.bias"] = random(6)
    shares = [fill(ColumnLinear(8, (4, 6), mesh, bias=True, reads=("a", "b")), stored)(X) for mesh in RANKS]
    assert [each.shape for each in shares] == [(3, 5), (3, 5)]
    whole = fill(ColumnLinear(8, (4, 6), ONE, bias=True, reads=("a", "b")), stored)(X)
    joined = torch.cat([shares[0][:, :2], shares[1][:, :2], shares[0][:, 2:], shares[1][:, 2:]], dim=1)
    torch.testing.assert_close(joined, whole)


def test_ranks_share_a_tensor_that_holds_all_sections() -> None:
    heads = Heads(query=4, kv=2, dim=2)
    stored = {"layers.0.c_attn.weight": random(8, 16)}
    shares = [fill(QKVLinear(8, heads, mesh, reads=("c_attn",), transposed=True), stored)(X) for mesh in RANKS]
    whole = fill(QKVLinear(8, heads, ONE, reads=("c_attn",), transposed=True), stored)(X)
    for index in range(3):
        torch.testing.assert_close(torch.cat([share[index] for share in shares], dim=1), whole[index])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_joined_layer_has_all_outputs_on_every_rank(transposed: bool) -> None:
    weight, bias = random(6, 8), random(6)
    stored = {"layers.0.part.weight": weight.T if transposed else weight, "layers.0.part.bias": bias}

    def joined(mesh: Mesh) -> Tensor:
        start, length = mesh.share(8)
        return fill(joined_linear(8, 6, mesh, bias=True, transposed=transposed), stored)(X[:, start : start + length])

    for way in ("gather", "sum"):
        meshes = [replace(mesh, reduce=way) for mesh in thread_meshes(2)]
        for found in run_on(meshes, joined):
            torch.testing.assert_close(found, X @ weight.T + bias)
    assert type(joined_linear(8, 6, ONE)) is ColumnLinear  # one rank combines nothing


def test_layers_name_the_parts_of_a_tensor_that_a_rank_reads() -> None:
    heads, rank = Heads(query=4, kv=2, dim=2), RANKS[1]
    whole = slice(None)
    fused = QKVLinear(8, heads, rank, bias=True, reads=("c_attn",), transposed=True)
    weight, bias = (slot.parts for slot in fused.tensor_slots("c_attn"))
    assert bias == ((slice(4, 8),), (slice(10, 12),), (slice(14, 16),))
    assert weight == tuple((whole, *part) for part in bias)
    (gate, up) = (slot.parts for slot in GatedLinear(8, 6, rank).tensor_slots("mlp"))
    assert gate == up == ((slice(3, 6),),)
    (row,) = SummedLinear(8, 6, rank).tensor_slots("o_proj")
    assert row.parts == ((whole, slice(4, 8)),)


def test_ranks_that_outnumber_the_key_value_heads_share_them() -> None:
    heads = Heads(query=8, kv=2, dim=2)
    stored = {f"layers.0.{name}_proj.weight": random(size, 8) for name, size in (("q", 16), ("k", 4), ("v", 4))}
    q, k, v = fill(QKVLinear(8, heads, ONE), stored)(X)
    for rank in range(4):
        found = fill(QKVLinear(8, heads, apart(rank, 4)), stored)(X)
        torch.testing.assert_close(found[0], q[:, rank * 2 : rank * 2 + 2])
        torch.testing.assert_close(found[1], k[:, rank // 2 : rank // 2 + 1])
        torch.testing.assert_close(found[2], v[:, rank // 2 : rank // 2 + 1])


@pytest.mark.parametrize(
    ("heads", "size", "message"),
    [
        (Heads(6, 6, 2), 4, "tensor_parallel_size is 4, must divide the 6 attention heads of this model; choose"),
        (Heads(12, 6, 2), 4, "tensor_parallel_size is 4, must divide the 6 key and value heads of this model; choose"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(heads: Heads, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        heads.share(apart(0, size))
