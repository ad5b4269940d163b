"""Activations by their names in config.json."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.layers.elementwise import OPERATOR_OF, activation
from tests.layers.bound import fill, random

EXPECTED = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", OPERATOR_OF)
def test_a_name_leads_to_its_function(name: str) -> None:
    x = random(3, 8)
    torch.testing.assert_close(fill(activation(name), {})(x), EXPECTED[name](x))
