"""Rows that different samplers draw: results come back in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.sampling.chunks import sampled_apart
from octavo.sampling.metadata import RowSamples, SamplingRow


@pytest.mark.parametrize("are_first", ["", "1", "0", "0110", "111", "000"])
def test_each_row_is_sampled_once_from_its_own_logits(are_first: str) -> None:
    rows: list[Any] = [f"row {number}" for number in range(len(are_first))]
    asked: dict[str, list[Any]] = {}

    def sampler(name: str) -> Callable[[Tensor, Sequence[SamplingRow]], list[RowSamples]]:
        def sample(logits: Tensor, given: Sequence[SamplingRow]) -> list[RowSamples]:
            assert name not in asked
            asked[name] = [*given]
            return [RowSamples([TokenLogprobs(token_id=int(each))]) for each in logits[:, 0]]

        return sample

    logits = torch.arange(len(rows)).unsqueeze(1).float()
    found = sampled_apart(logits, rows, [each == "1" for each in are_first], sampler("1"), sampler("0"))
    assert [each.tokens[0].token_id for each in found] == [*range(len(rows))]
    expected = {name: [row for row, each in zip(rows, are_first, strict=True) if each == name] for name in "10"}
    assert asked == {name: each for name, each in expected.items() if each}
