"""What every layer with weights tells the loader, and what it is told once they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.ops.registry import Ops


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One checkpoint tensor that a layer reads."""

    name: str
    """Its name, without what the checkpoint puts before all names of a model."""
    shape: tuple[int, ...]
    """Its shape in the checkpoint."""
    fill: Callable[[Tensor], None]
    """Copies it, or this rank's share of it, into the parameter. Casts to the parameter's type."""
    required: bool = True
    """Optional ones may be absent and are filled last."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What layers get after loading: the operators and the attention backend chosen at start."""

    ops: Ops
    backend: AttentionBackend


class Layer(nn.Module):
    """A module that reads tensors or runs operators. By default each parameter is one tensor of the same name."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """The tensors of the layer at `path` in the model (`layers.0.mlp.down_proj`)."""
        for name, parameter in self.named_parameters(recurse=False):
            yield TensorSlot(f"{path}.{name}", tuple(parameter.shape), partial(_copy, parameter))

    def bind(self, binding: Binding) -> None:
        """Called once after the parameters are filled. By default a layer needs nothing of it."""


def _copy(parameter: Tensor, stored: Tensor) -> None:
    parameter.copy_(stored)
