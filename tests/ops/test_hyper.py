"""Hyper-connections of no tokens at all, as a rank may have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.ops.hyper import OPERATORS


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: each.name)
def test_no_tokens_have_no_streams(operator: Any) -> None:
    for example in operator.examples(torch.float32):
        tokens = len(example[0])
        # scales and bases are no rows of tokens
        rows = {index for index, each in enumerate(example) if isinstance(each, torch.Tensor) and each.ndim > 1}
        empty = [each[:0] if index in rows else each for index, each in enumerate(example)]
        made, of_some = operator.reference(*empty), operator.reference(*example)
        pairs = zip(made, of_some, strict=True) if isinstance(made, tuple) else [(made, of_some)]
        for none, some in pairs:
            assert none.shape == (0, *some.shape[1:])
            assert len(some) == tokens
