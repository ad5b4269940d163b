"""A forward pass on tensors without data, which finds the memory that a step holds before any weight is read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octavo.attention.backend import Parts, StepSizes
from octavo.attention.metadata import AttentionMetadata
from octavo.core.light_torch import import_meta_registrations

META = torch.device("meta")


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class DryAttention:
    """An attention backend that computes nothing; `empty` makes the tensor that it returns."""

    name = "dry run"
    element_type = torch.uint8

    def __init__(self, empty: Callable[[tuple[int, ...], torch.dtype], Tensor] = _empty) -> None:
        self._empty = empty

    def cache_shape(self, num_blocks: int, *sizes: int) -> tuple[int, ...]:
        """Return the shape of a cache without elements: a dry run stores nothing."""
        return 1, num_blocks, 0

    def workspace_bytes(self, sizes: StepSizes) -> int:
        """Return 0: the workspace of the real backend is counted by its own method."""
        return 0

    def gathered_bytes(self, sizes: StepSizes, num_keys: int) -> int:
        """Return 0: the bytes for gathered keys are counted by the real backend's own method."""
        return 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, *_: Any) -> Tensor:
        return self._empty(tuple(q.shape), q.dtype)

    def run_latents(self, q: Parts, latents: Parts, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        return self._empty(tuple(q[0].shape), q[0].dtype)


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that torch holds for new tensors while `run` computes on the meta device."""
    try:
        return _peak_bytes(run)
    except NotImplementedError:
        # an operator of torch itself needs a part that is not imported at start
        import_meta_registrations()
        return _peak_bytes(run)


def _peak_bytes(run: Callable[[], object]) -> int:
    meter = _Meter()
    with torch.inference_mode(), meter:
        run()
    return meter.peak


def _embedding(ids: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


_INSTEAD: Final[dict[Any, Callable[..., Tensor]]] = {
    F.embedding: _embedding,
    F.layer_norm: lambda x, *_, **__: torch.empty_like(x),
}
"""Functions of torch whose implementation on the meta device is not in the parts of torch that an engine imports."""


class _Meter(TorchFunctionMode):
    """Follows the memory of the tensors that torch's functions return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._uses: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = _INSTEAD.get(func, func)(*args, **(kwargs or {}))
        made = tensors_in(result)
        if made:
            inputs = {storage_of(each) for each in tensors_in((args, kwargs))}
            for tensor in made:
                self._follow(tensor, is_new=storage_of(tensor) not in inputs)
        return result

    def _follow(self, tensor: Tensor, *, is_new: bool) -> None:
        storage, num_bytes = storage_of(tensor), tensor.untyped_storage().nbytes()
        if storage not in self._uses:
            if not is_new:
                return  # a view of memory that is counted elsewhere
            self._uses[storage] = 0
            self._live += num_bytes
            self.peak = max(self.peak, self._live)
        self._uses[storage] += 1
        weakref.finalize(tensor, self._end, storage, num_bytes)

    def _end(self, storage: int, num_bytes: int) -> None:
        self._uses[storage] -= 1
        if not self._uses[storage]:
            del self._uses[storage]
            self._live -= num_bytes


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries; torch's `tree_leaves` takes five times as long."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object: views of one memory have the same."""
    storage: int = tensor.untyped_storage()._cdata
    return storage
