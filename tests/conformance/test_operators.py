"""Every operator with a kernel: right by its reference on the operator's own examples, at every level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.registry import Operator, operators
from tests.conformance.runtimes import LEVELS, TYPES, ops

OPERATORS = operators()


def tensors_of(answer: Any) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else answer


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_a_kernel_agrees_with_the_reference(operator: Operator, level: str, dtype: torch.dtype) -> None:
    kernel = getattr(ops(level), operator.name)
    for arguments in operator.examples(dtype):
        found, expected = (
            tensors_of(operator.trial(kernel, *arguments)),
            tensors_of(operator.trial(operator.reference, *arguments)),
        )
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is other.dtype
            difference = (one.double() - other.double()).abs() / (1 + other.double().abs())
            assert difference.max() <= operator.tolerance[dtype]
