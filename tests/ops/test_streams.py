"""Operators over several streams against their formulas in float64; a token has the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.streams import OPERATORS


def predicted(x: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    count = states.shape[1]
    streams, factors = x.view(len(x), count, -1), weight.view(count, count, count)
    return (streams + torch.einsum("jik,tk,tid->tjd", factors, states, streams)).flatten(1)


def corrected(x: Tensor, computed: Tensor, states: Tensor, weight: Tensor, active: int) -> Tensor:
    streams = x.view(*states.shape, -1)
    shares = 1 + torch.einsum("ik,tk->ti", weight, states)
    return (streams + torch.einsum("ti,td->tid", shares, computed - streams[:, active])).flatten(1)


def added(x: Tensor, y: Tensor) -> Tensor:
    streams = x.view(len(x), -1, y.shape[1])
    return torch.stack([each + y if place else each for place, each in enumerate(streams.unbind(1))], 1).flatten(1)


def added_to_last(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((x[:, : -y.shape[1]], x[:, -y.shape[1] :] + y), 1)


def attended(x: Tensor, norm: Tensor, query: Tensor, eps: float) -> Tensor:
    streams = x.unflatten(1, (-1, len(query)))
    normed = torch.nn.functional.rms_norm(streams, query.shape, norm, eps)
    return torch.einsum("tn,tnd->td", torch.softmax(normed @ query, 1), streams)


def spread(x: Tensor, *others: Tensor) -> Tensor:
    streams = torch.stack(others, 1)
    size, own = x.square().mean(1)[:, None, None], streams.square().mean(2, keepdim=True)
    return torch.cat((x[:, None], streams * (size / own.clamp(min=1e-5)).sqrt()), 1).flatten(1)


def gates(x: Tensor, deviations: float) -> Tensor:
    return (x - x.mean(1, keepdim=True) - deviations * x.std(1, correction=0, keepdim=True)).clamp(min=0)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "predicted_streams": predicted,
    "corrected_streams": corrected,
    "add_to_others": added,
    "add_to_last": added_to_last,
    "attended_streams": attended,
    "spread_streams": spread,
    "mean_stream": lambda x, *others: spread(x, *others).view(len(x), -1, x.shape[1]).mean(1),
    "largest_gates": gates,
}
NAMED = {each.name: each for each in OPERATORS}


def in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_an_operator_computes_its_formula(name: str, dtype: torch.dtype) -> None:
    for arguments in NAMED[name].examples(dtype):
        found, expected = NAMED[name].reference(*arguments), FORMULAS[name](*map(in_float64, arguments))
        assert found.dtype == dtype
        tolerance = NAMED[name].tolerance[dtype]
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_a_token_has_the_same_bits_alone(name: str, dtype: torch.dtype) -> None:
    for arguments in NAMED[name].examples(dtype):
        tokens = len(arguments[0])
        of_rows = [isinstance(each, Tensor) and len(each) == tokens for each in arguments]
        together = NAMED[name].reference(*arguments)
        for token in range(tokens):
            row = slice(token, token + 1)
            alone = [each[row] if is_row else each for each, is_row in zip(arguments, of_rows, strict=True)]
            assert torch.equal(NAMED[name].reference(*alone), together[row])
