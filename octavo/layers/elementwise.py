"""Functions of single elements: activations by the names that checkpoints use, and addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.errors import CheckpointError
from octavo.layers.layer import Layer, TensorSlot
from octavo.ops.registry import Ops

OPERATOR_OF: Final[Mapping[str, str]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""The operators of activations, by their names in config.json."""


class Elementwise(Layer):
    """A function of tensors [tokens, dim] of one shape, and of fixed numbers."""

    def __init__(self, operator: str, *numbers: float) -> None:
        super().__init__()
        self._operator, self._numbers = operator, numbers

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the function of tensors [tokens, dim], of the same shape unless the operator says otherwise."""
        return getattr(self.ops, self._operator)(*tensors, *self._numbers)


class RoundedFactor(Elementwise):
    """A tensor [tokens, dim] times a number, which is rounded to the type of the tensor."""

    def __init__(self, factor: float) -> None:
        super().__init__("scaled")
        types = torch.float32, torch.bfloat16, torch.float16
        self._factors = {dtype: float(torch.tensor(factor, dtype=dtype, device="cpu")) for dtype in types}

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the product, of the same shape."""
        (x,) = tensors
        return self.ops.scaled(x, self._factors[x.dtype])


class StoredFactor(Layer):
    """A tensor [tokens, dim] times what the checkpoint has under the layer's name: one number, or `dim` of them."""

    def __init__(self, dim: int, *, numbers: int = 1) -> None:
        super().__init__()
        self._numbers = numbers
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, of the same shape."""
        return self.ops.multiplied(x, self.weight)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensor [numbers]."""
        yield TensorSlot(path, (self._numbers,), self._fill)

    def _fill(self, stored: Tensor) -> None:
        self.hold("weight", stored.expand(len(self.weight)))


class TanhGate(StoredFactor):
    """A tensor [tokens, dim] times the hyperbolic tangent of one stored number."""

    def _fill(self, stored: Tensor) -> None:
        super()._fill(torch.tanh(stored))


class XIELU(Layer):
    """xIELU with the two factors that the checkpoint has of each layer. Raises CheckpointError for another beta."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, dim] → the same shape."""
        return self.ops.xielu(x, self.weight)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the stored tensors [1] of the factors, and those that are equal in all layers."""
        for place, name in enumerate(("alpha_p", "alpha_n")):
            yield TensorSlot(f"{path}.{name}", (1,), partial(self._fill, place))
        for name, value in (("beta", 0.5), ("eps", -1e-6)):
            yield TensorSlot(f"{path}.{name}", (), partial(_check, f"{path}.{name}", value), required=False)

    def _fill(self, place: int, stored: Tensor) -> None:
        self.room("weight", stored.device)[place] = F.softplus(stored[0].float()) + 0.5 * place


def _check(name: str, value: float, stored: Tensor) -> None:
    if abs(float(stored) - value) > 0.01 * abs(value):
        raise CheckpointError(f"{name} is {float(stored):g}, expected {value:g}: no other is implemented")


class QuickGELU(Layer):
    """`x · sigmoid(1.702 · x)`."""

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, dim] → the same shape."""
        return self.ops.gated_by_sigmoid(x, self.ops.scaled(x, 1.702))


_OTHERS: Final[Mapping[str, type[Layer]]] = {"quick_gelu": QuickGELU, "xielu": XIELU}
"""Activations that are more than one operator."""


def activation(name: str) -> Layer:
    """Make the activation that config.json calls `name`: quick_gelu, xielu, or a key of `OPERATOR_OF`."""
    return _OTHERS[name]() if name in _OTHERS else Elementwise(OPERATOR_OF[name])


def limited_swiglu(ops: Ops, x: Tensor, limit: float) -> Tensor:
    """Return `min(silu(gate), limit) · up`, up within the limit on either side; x [tokens, 2 · dim] is gate beside up.

    limit: above 0.3, which no value of SiLU is as far below 0.
    """
    gate, up = x.chunk(2, dim=-1)
    return ops.multiplied(ops.clamped(ops.gated_by_sigmoid(gate, gate), limit), ops.clamped(up, limit))


def capped_swiglu(ops: Ops, x: Tensor, limit: float) -> Tensor:
    """Return `silu(min(gate, limit)) · up`, up within the limit on either side; x is as of `limited_swiglu`."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return ops.multiplied(ops.gated_by_sigmoid(gate, gate), ops.clamped(up, limit))


def capped_gate(ops: Ops, x: Tensor, cap: float, up_cap: float | None = None) -> Tensor:
    """Return `capped(gate) · sigmoid(gate) · up`, the gate and up, where it has one, soft-capped; x is as of
    `limited_swiglu`."""
    gate, up = (each.contiguous() for each in x.chunk(2, dim=-1))
    gated = ops.gated_by_sigmoid(ops.soft_capped(gate, cap), gate)
    return ops.multiplied(gated, up if up_cap is None else ops.soft_capped(up, up_cap))


def _of_gate(name: str, ops: Ops, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return ops.multiplied(getattr(ops, OPERATOR_OF[name])(gate), up)


GATED: Final[Mapping[str, Callable[..., Tensor] | None]] = {
    "silu": None,
    "gelu_pytorch_tanh": lambda ops, x: ops.gelu_tanh_and_mul(x),
    "gelu": partial(_of_gate, "gelu"),
    "relu2": partial(_of_gate, "relu2"),
    "clamped_swiglu": lambda ops, x, *numbers: ops.clamped_swiglu(x, *numbers),
    "limited_swiglu": limited_swiglu,
    "capped_swiglu": capped_swiglu,
    "situ": capped_gate,
}
"""Products with gates by names of activations: (operators, gate beside up [tokens, 2 · dim], the activation's numbers)
→ [tokens, dim]. Those of silu are a part of the product that makes gate and up."""


def addition() -> Elementwise:
    """Make `x + y`, for places where no norm follows that it could be fused with."""
    return Elementwise("add")
