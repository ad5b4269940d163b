"""Hyper-connections: blocks read a mixture of several residual streams, and write shares of their output into each.

The weights of both, and a matrix that mixes the streams, follow from all streams of a token together. They are computed
in float32 whatever the type of the model. Sources: https://arxiv.org/abs/2409.19606, https://arxiv.org/abs/2512.24880.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.ops.hyper import Mixing
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """`count` streams of `dim` elements each, `rounds` of Sinkhorn and Knopp with the `eps` of their sums, and that of
    the norm of all streams."""

    count: int
    dim: int
    rounds: int
    eps: float
    norm_eps: float

    @property
    def width(self) -> int:
        """Elements of all streams of a token."""
        return self.count * self.dim


class _OfStreams(Layer):
    """Numbers of each token that follow from all its streams: a product of their norm, with factors and biases.

    `prefix` stands before the names of the stored tensors `fn` [outputs, width], `base` [outputs] and `scale`.
    """

    parameter_dtype = torch.float32

    def __init__(self, sizes: StreamSizes, outputs: int, num_scales: int, prefix: str) -> None:
        super().__init__()
        self.sizes, self._outputs, self._prefix = sizes, outputs, prefix
        shapes = {"fn": (outputs, sizes.width), "base": (outputs,), "scale": (num_scales,)}
        for name, shape in shapes.items():
            self.register_parameter(prefix + name, nn.Parameter(torch.empty(shape), requires_grad=False))
        self._prepared: PreparedLinear

    def products(self, x: Tensor) -> Tensor:
        """x [tokens, streams · dim] → float32 [tokens, outputs]."""
        return self._prepared(self.ops.normed_streams(x, self._ones, self.sizes.norm_eps))

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """Factors and biases."""
        return self.get_parameter(f"{self._prefix}scale"), self.get_parameter(f"{self._prefix}base")

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the weight of a norm that has none."""
        super().bind(binding)
        width = self.sizes.width
        self._ones = binding.once(("ones", width), lambda: torch.ones(width, device=binding.device))

    def finish(self) -> None:
        name = f"{self._prefix}fn"
        self._prepared = self.ops.prepare_linear(self.get_parameter(name).data)
        self.register_parameter(name, None)

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        own = super().state_specs(ops)
        del own[f"{self._prefix}fn"]
        return own | {f"fn.{part}": spec for part, spec in ops.prepare_linear.state_specs(self._shape()).items()}

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **{f"fn.{part}": tensor for part, tensor in self._prepared.state().items()}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore({name: tensor for name, tensor in state.items() if not name.startswith("fn.")})
        weight = {name.removeprefix("fn."): tensor for name, tensor in state.items() if name.startswith("fn.")}
        self._prepared = self.ops.prepare_linear.restore(self._shape(), weight)
        self.register_parameter(f"{self._prefix}fn", None)

    def _shape(self) -> LinearShape:
        return LinearShape(self._outputs, self.sizes.width, torch.float32)


class Connection(_OfStreams):
    """Computes the input of a block from the streams (`forward`), and adds its output to them (`join`)."""

    def join(self, x: Tensor, out: Tensor, mixing: Mixing) -> Tensor:
        """Return the streams after a block that has read those of x and returned `out` [tokens, dim]."""
        return self.ops.mixed_streams(x, out, mixing.write, mixing.mix)


class HyperConnection(Connection):
    """A connection whose matrix mixes the streams."""

    def __init__(self, sizes: StreamSizes) -> None:
        super().__init__(sizes, sizes.count * (sizes.count + 2), 3, "")

    def forward(self, x: Tensor) -> tuple[Tensor, Mixing]:
        """x [tokens, streams · dim] → what the block reads [tokens, dim], and what `join` needs."""
        mixing: Mixing = self.ops.stream_mixing(self.products(x), *self.numbers, self.sizes.rounds, self.sizes.eps)
        return self.ops.weighed_stream(x, mixing.read), mixing


class PlainConnection(Connection):
    """A connection without a matrix: adds to each stream a share of the output, at most `most`."""

    def __init__(self, sizes: StreamSizes, most: float) -> None:
        super().__init__(sizes, 2 * sizes.count, 2, "")
        self._most = most

    def forward(self, x: Tensor) -> tuple[Tensor, Mixing]:
        """x [tokens, streams · dim] → what the block reads [tokens, dim], and what `join` needs."""
        mixing: Mixing = self.ops.plain_mixing(self.products(x), *self.numbers, self._most, self.sizes.eps)
        return self.ops.weighed_stream(x, mixing.read), mixing


class HyperHead(_OfStreams):
    """Reduces the streams to one after the last layer. Its tensors are `hc_fn`, `hc_base` and `hc_scale`."""

    def __init__(self, sizes: StreamSizes) -> None:
        super().__init__(sizes, sizes.count, 1, "hc_")

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, streams · dim] → [tokens, dim]."""
        weights = self.ops.stream_weights(self.products(x), *self.numbers, self.sizes.eps)
        return self.ops.weighed_stream(x, weights)


class AttendedStreams(Layer):
    """Computes the mean of streams that one query attends to. Its tensors are `_norm.weight` and `_proj.weight` behind
    its name.

    Source: Kimi K3's release.
    """

    parameter_dtype = torch.float32

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.norm, self.query = (nn.Parameter(torch.empty(dim), requires_grad=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, streams · dim] → [tokens, dim]."""
        return self.ops.attended_streams(x, self.norm, self.query, self._eps)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the weight [dim] of the norm and the query [1, dim]."""
        dim = len(self.norm)
        yield TensorSlot(f"{path}_norm.weight", (dim,), partial(self.hold, "norm"))
        yield TensorSlot(f"{path}_proj.weight", (1, dim), lambda stored: self.hold("query", stored[0]))


class MeanOfStreams(Layer):
    """Computes the mean of the streams after the last layer."""

    def __init__(self, sizes: StreamSizes) -> None:
        super().__init__()
        self._count = sizes.count
        self._weights: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, streams · dim] → [tokens, dim]."""
        return self.ops.weighed_stream(x, self._weights.expand(len(x), -1))

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the weights of the mean."""
        super().bind(binding)
        count = self._count
        self._weights = binding.once(
            ("mean", count), lambda: torch.full((1, count), 1.0 / count, device=binding.device)
        )
