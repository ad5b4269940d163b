"""The experts of a layer: every layout of a checkpoint gives the same weights, in every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Axis, Mesh
from octavo.errors import CheckpointError
from octavo.layers.experts import Experts, StoredExperts
from octavo.layers.layer import Binding
from octavo.layers.routers import Router
from octavo.ops.experts import RouterRule, route
from octavo.ops.registry import bind
from octavo.quantization.registry import method_named

HIDDEN, WIDTH, COUNT = 64, 24, 4
GENERATOR = torch.Generator().manual_seed(0)
GATE, UP = (torch.randn((COUNT, WIDTH, HIDDEN), generator=GENERATOR) / 8 for _ in range(2))
DOWN = torch.randn((COUNT, HIDDEN, WIDTH), generator=GENERATOR) / 5
X = torch.randn((7, HIDDEN), generator=GENERATOR)
ROUTING = route(torch.randn((7, COUNT), generator=GENERATOR), RouterRule(2))


def tensors(stored: StoredExperts) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with this layout."""
    if not stored.is_stacked:
        parts = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}
        return {f"e.{n}.{name}.weight": part[n] for name, part in parts.items() for n in range(COUNT)}
    both = torch.stack((GATE, UP), 2).flatten(1, 2) if stored.is_interleaved else torch.cat((GATE, UP), 1)
    whole = {"e.gate_up_proj": both, "e.down_proj": DOWN}
    return {name: each.transpose(1, 2).contiguous() if stored.is_transposed else each for name, each in whole.items()}


def run(stored: StoredExperts, mesh: Mesh | None = None, quantization: str | None = None) -> tuple[Experts, Tensor]:
    layer = Experts(HIDDEN, WIDTH, COUNT, mesh or Mesh.single(), stored=stored)
    layer.use(lambda _: method_named(quantization), "e")
    layer.bind(Binding(bind(), ReferenceBackend(torch.float32)))
    given = tensors(stored)
    for slot in layer.tensor_slots("e"):
        assert tuple(given[slot.name].shape) == slot.shape
        slot.fill(given[slot.name])
    layer.finish()
    return layer, layer(X, ROUTING)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_all_layouts_are_the_same_experts_and_are_restored(quantization: str | None) -> None:
    layer, expected = run(StoredExperts(), quantization=quantization)
    for transposed in (False, True):
        for interleaved in (False, True):
            stored = StoredExperts(is_stacked=True, is_transposed=transposed, is_interleaved=interleaved)
            assert torch.equal(run(stored, quantization=quantization)[1], expected)
    again = Experts(HIDDEN, WIDTH, COUNT, Mesh.single(), stored=StoredExperts())
    again.use(lambda _: method_named(quantization), "e")
    again.bind(Binding(bind(), ReferenceBackend(torch.float32)))
    state = layer.state()
    assert {name: spec.shape for name, spec in again.state_specs(bind()).items()} == {
        name: tuple(each.shape) for name, each in state.items()
    }
    again.restore(state)
    assert torch.equal(again(X, ROUTING), expected)


@pytest.mark.parametrize("damaged", ["gate.correction", "gate.factors"])
def test_numbers_beside_a_router_with_which_none_can_be_chosen_are_refused_by_name(damaged: str) -> None:
    router = Router(HIDDEN, COUNT, RouterRule(2), correction="correction", factors="factors")
    slots = {slot.name: slot.fill for slot in router.tensor_slots("gate.router")}
    with pytest.raises(CheckpointError, match=f"{damaged} holds NaN or an infinity, with which no expert can be"):
        slots[damaged](torch.tensor([0.0, 1.0, 2.0, torch.nan]))


def test_experts_compute_the_weighted_sum_of_their_products() -> None:
    expected = torch.zeros_like(X)
    for token in range(len(X)):
        for place in range(2):
            row = int(ROUTING.places[2 * token + place])
            expert = int((ROUTING.starts[1:] <= row).sum())
            hidden = torch.nn.functional.silu(GATE[expert] @ X[token]) * (UP[expert] @ X[token])
            expected[token] += ROUTING.weights[token, place] * (DOWN[expert] @ hidden)
    torch.testing.assert_close(run(StoredExperts())[1], expected)


def test_a_rank_reads_its_experts_alone() -> None:
    for stored in (StoredExperts(), StoredExperts(is_stacked=True)):
        parts = [run(stored, Mesh(expert=Axis(rank, 2)))[1] for rank in range(2)]
        # each rank sums the pairs of its own experts; the mesh adds the two before they are weighted
        torch.testing.assert_close(parts[0] + parts[1], run(stored)[1])
