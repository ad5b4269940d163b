"""Every operator with a kernel: right by its reference on the operator's own examples, at every level."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.registry import operators
from tests.conformance.agreement import check_agreement
from tests.conformance.runtimes import LEVELS, TYPES, ops


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", operators())
def test_a_kernel_agrees_with_the_reference(name: str, level: str, dtype: torch.dtype) -> None:
    check_agreement(ops(level), name, dtype)
