"""What implementations of an operator have to agree on with its reference, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.registry import Ops, operators


def check_agreement(ops: Ops, name: str, dtype: torch.dtype) -> None:
    """Compare the operator `name` that is bound in `ops` with its reference, on the examples of the operator."""
    operator = operators()[name]
    for arguments in operator.examples(dtype):
        found, expected = (
            _tensors(operator.trial(each, *arguments)) for each in (getattr(ops, name), operator.reference)
        )
        for one, other in zip(found, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            difference = (one.double() - other.double()).abs() / (1 + other.double().abs())
            assert difference.max() <= operator.tolerance[dtype]


def _tensors(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found
