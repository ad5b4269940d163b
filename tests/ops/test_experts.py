"""Experts: a row has the bits that its expert's linear gives it alone, whoever else is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo.ops.experts import PreparedStack, RouterRule, Routing, route, routing_of
from octavo.ops.prepare_linear import LinearFormat, LinearShape, PreparedLinear
from octavo.ops.registry import Ops, bind
from octavo.platform import Platform
from octavo.quantization.registry import QUANTIZED, method_named

FORMATS = (None, *QUANTIZED)
EXPERTS, TOP_K = 5, 2


def all_ops() -> Iterator[tuple[str, Ops]]:
    """Yield the references, and the compiled operators at each instruction set that runs here."""
    yield "reference", bind()
    if Platform.detect().native_module is not None:
        from octavo import _native
        from octavo.devices.cpu.runtime import CpuRuntime

        for name in _native.instruction_sets():
            yield name, CpuRuntime.open(2, name).bind()


OPS = dict(all_ops())


def make_stack(
    kept: LinearFormat, dtype: torch.dtype, *, gated: bool, bias: bool, experts: range = range(EXPERTS)
) -> tuple[PreparedStack, list[PreparedLinear]]:
    """Make the stack of some of five experts, and all of them as linears of their own."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn((EXPERTS, 70, 96), generator=generator) / 10).to(dtype)
    biases = torch.randn((EXPERTS, 70), generator=generator).to(dtype)
    shape = LinearShape(70, 96, dtype, bias, gated)
    specs = kept.state_specs(shape)
    state = {name: torch.zeros((len(experts), *spec.shape), dtype=spec.dtype) for name, spec in specs.items()}
    for place, expert in enumerate(experts):
        own = {name: tensor[place] for name, tensor in state.items()}
        kept.pack_into(own, weights[expert], biases[expert] if bias else None, gated=gated)
    linears = [kept(weights[expert], biases[expert] if bias else None, gated=gated) for expert in range(EXPERTS)]
    return kept.restore_stack(shape, state, experts.start), linears


def route_tokens(tokens: int) -> Routing:
    """Route tokens to five experts, of which the last is chosen by none."""
    logits = torch.randn((tokens, EXPERTS), generator=torch.Generator().manual_seed(tokens))
    logits[:, -1] = -9.0
    return route(logits, RouterRule(TOP_K))


def expert_of(routing: Routing, row: int) -> int:
    return int((routing.starts[1:] <= row).sum())


@pytest.mark.parametrize("level", OPS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_of_their_experts_linear(level: str, name: str, dtype: torch.dtype) -> None:
    kept: LinearFormat = method_named(name).format(OPS[level])
    for gated in (True, False):
        stack, linears = make_stack(kept, dtype, gated=gated, bias=not gated)
        for tokens in (1, 3, 40):
            routing = route_tokens(tokens)
            x = torch.randn((tokens, 96), generator=torch.Generator().manual_seed(tokens)).to(dtype)
            rows = x[routing.order.long() // TOP_K]
            found = stack(x, routing, of_tokens=True).clone()
            again = stack(rows, routing, of_tokens=False, in_float32=True)
            for row in range(len(rows)):
                linear = linears[expert_of(routing, row)]
                if level == "reference" and dtype is torch.bfloat16:
                    continue  # torch's products in bfloat16 depend on the number of rows on some machines
                assert torch.equal(found[row], linear(rows[row : row + 1])[0])
                assert torch.equal(again[row], linear.in_float32(rows[row : row + 1])[0])


@pytest.mark.parametrize("level", OPS)
@pytest.mark.parametrize("name", FORMATS)
def test_an_expert_that_a_token_has_twice_reads_the_row_of_the_token_twice(level: str, name: str) -> None:
    kept: LinearFormat = method_named(name).format(OPS[level])
    stack, linears = make_stack(kept, torch.float32, gated=False, bias=False)
    x = torch.randn((3, 96), generator=torch.Generator().manual_seed(0))
    x[1:] = torch.nan  # what lies behind the only token
    found = stack(x[:1], routing_of(torch.tensor([[2, 2]]), torch.ones(1, 2), EXPERTS), of_tokens=True)
    expected = linears[2](x[:1])[0]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


@pytest.mark.parametrize("level", OPS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_experts_elsewhere_are_zeros(level: str, name: str) -> None:
    kept: LinearFormat = method_named(name).format(OPS[level])
    parts = [
        make_stack(kept, torch.float32, gated=True, bias=False, experts=each)[0] for each in (range(2), range(2, 5))
    ]
    whole, _ = make_stack(kept, torch.float32, gated=True, bias=False)
    routing, x = route_tokens(9), torch.randn(9, 96)
    first, second, both = (stack(x, routing, of_tokens=True).clone() for stack in (*parts, whole))
    assert torch.equal(first + second, both)
    assert not torch.equal(first, both)


@pytest.mark.parametrize("level", OPS)
def test_routing_groups_pairs_by_expert_in_the_order_of_tokens(level: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    routing = OPS[level].route(logits, RouterRule(2, is_normalized=True))
    assert routing.starts.tolist() == [0, 2, 4, 6]
    assert routing.order.tolist() == [2, 4, 0, 5, 1, 3]
    assert [routing.order[place] for place in routing.places] == list(range(6))
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(3))


RULES = {
    "groups": RouterRule(6, "sigmoid", is_normalized=True, factor=2.5, num_groups=8, groups_kept=3),
    "corrected logits": RouterRule(6, "sigmoid", is_normalized=True, corrects_logits=True),
    "many": RouterRule(40),
    "all": RouterRule(64, is_normalized=True),
    "near": RouterRule(3, "softmax_near", threshold=0.3),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("level", OPS)
def test_a_tokens_experts_do_not_depend_on_the_others(level: str, rule: RouterRule) -> None:
    logits = torch.randn((20, 64), generator=torch.Generator().manual_seed(3)) * 3
    logits[0, 5], logits[1] = float("nan"), 1.0
    bias = None if rule.score == "softmax_near" else torch.randn(64, generator=torch.Generator().manual_seed(4))
    found, expected = (each.route(logits, rule, bias) for each in (OPS[level], OPS["reference"]))
    chosen = torch.searchsorted(found.starts, found.places, right=True).view(20, -1)[1:]
    assert torch.equal(chosen, torch.searchsorted(expected.starts, expected.places, right=True).view(20, -1)[1:])
    weights = found.weights.clone()
    torch.testing.assert_close(weights[1:], expected.weights[1:], rtol=1e-5, atol=1e-6)
    for token in range(20):
        alone = OPS[level].route(logits[token : token + 1], rule, bias).weights[0]
        assert torch.equal(alone.nan_to_num(9.0), weights[token].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", OPS)
def test_inputs_that_experts_return_or_are_given_are_those_of_their_token(level: str, dtype: torch.dtype) -> None:
    ops, reference = OPS[level], OPS["reference"]
    for tokens, width in ((1, 1), (7, 37), (3, 64), (5, 130)):
        wide = torch.randn((tokens, 2 * width + 8), generator=torch.Generator().manual_seed(width)).to(dtype)
        wide[0, -1], (x, base) = float("nan"), wide[:, 8:].chunk(2, dim=1)  # rows lie apart
        routing, weights = route_tokens(tokens), torch.rand(tokens, 1)
        for first in (0, 2, EXPERTS):
            found = ops.add_inputs(base, x, routing, first).clone()
            want = reference.add_inputs(base, x, routing, first)
            torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2, equal_nan=True)
            assert first < EXPERTS or torch.equal(found.nan_to_num(9.0), base.nan_to_num(9.0))
        product, ones = ops.weighted_inputs(x, weights)
        assert torch.equal(product, reference.weighted_inputs(x, weights)[0])
        assert torch.equal(ones, torch.ones(tokens, 1))
