"""Streams, and choices of experts, of no tokens at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops import experts, hyper, streams

ROUTERS = [each for each in experts.OPERATORS if each.name in ("route", "route_to")]


@pytest.mark.parametrize("operator", [*hyper.OPERATORS, *streams.OPERATORS, *ROUTERS], ids=lambda each: each.name)
def test_no_tokens_have_no_streams(operator: Any) -> None:
    """As those of several, but for their number."""
    (example,) = [each for each in operator.examples(torch.float32) if len(each[0]) == 1][:1]
    # what belongs to a token has one row here; weights have more
    empty = [
        each[:0] if isinstance(each, torch.Tensor) and each.ndim > 1 and len(each) == 1 else each for each in example
    ]
    made, of_one = operator.reference(*empty), operator.reference(*example)
    none, one = (made[0], of_one[0]) if isinstance(made, tuple) else (made, of_one)
    assert none.shape == (0, *one.shape[1:])
    assert len(one) == 1


def test_no_tokens_are_chosen_for_by_groups() -> None:
    rule = experts.RouterRule(2, num_groups=4, groups_kept=2, group_best=1)
    routing = experts.route(torch.zeros(0, 8), rule)
    assert routing.weights.shape == (0, 2)
    assert routing.starts.tolist() == [0] * 9
