"""Filling and binding layers outside a model."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Axis, Mesh
from octavo.layers.layer import Binding, Layer
from octavo.ops.registry import bind

L = TypeVar("L", bound=Layer)


class Apart(Mesh):
    """A rank of several that answers its own share, for the test to combine."""

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, share: Tensor) -> Tensor:
        return share


def apart(rank: int, size: int) -> Apart:
    """Return the place of a rank that shares each layer with `size - 1` others."""
    return Apart(Axis(rank, size))


def fill(layer: L, stored: dict[str, Tensor], path: str = "layers.0.part") -> L:
    """Fill `layer` from tensors by name, bind it to the references and finish it."""
    for slot in layer.tensor_slots(path):
        tensor = stored[slot.name]
        assert tuple(tensor.shape) == slot.shape
        slot.fill(tensor)
    return finish(layer)


def finish(layer: L) -> L:
    """Bind a filled layer to the references and finish it."""
    ops = bind()
    layer.bind(Binding(ops, ReferenceBackend()))
    layer.finish()
    return layer


def random(*shape: int) -> Tensor:
    """Numbers that are the same for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
