"""A device whose memory is apart, on a machine that has none: tensors "on" it cannot be mixed with those of the host.

`ApartTensor` wraps a tensor of the CPU and says that it is on the device "apart". Under `ApartMode` every operator of
torch is computed on what is inside, and raises `MixedDevices` where an operator on CUDA would: for tensors of both
kinds, and for a view of the memory as an array. Triton's interpreter reads what is inside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.backend_registration as backends
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

NAME = "apart"
_MOVES = ("aten._to_copy.", "aten.to.", "aten.copy_.", "aten._local_scalar_dense.", "aten.new_")
"""Operators that take tensors from one memory to another, or only the shape of a tensor."""
_COPIES = ("aten._to_copy.", "aten.to.", "aten.copy_.")
_INDEXED = ("aten.index.", "aten.index_put")
"""Their indexes may be in the memory of the host."""


class MixedDevices(AssertionError):
    """An operator was given tensors of both memories."""


def open_apart() -> torch.device:
    """Register the device, once in a process, and return it."""
    if backends._privateuse1_backend_name != NAME:
        backends._setup_privateuseone_for_python_backend(NAME)
    # torch.tensor(…, device=…) makes a tensor of the host, and moves it
    torch._C._set_only_lift_cpu_tensors(True)
    return torch.device(NAME, 0)


class ApartTensor(Tensor):
    """A tensor of the device."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> ApartTensor:
        with torch.inference_mode(False):  # what is made in that mode has no versions, which views need
            made = Tensor._make_wrapper_subclass(
                cls,
                inside.shape,
                strides=inside.stride(),
                storage_offset=inside.storage_offset(),
                dtype=inside.dtype,
                device=torch.device(NAME, 0),
            )
        assert isinstance(made, ApartTensor)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    def tolist(self) -> Any:
        return self.inside.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{self.inside!r} on the device"

    def numpy(self, *, force: bool = False) -> Any:
        raise MixedDevices("an array of a tensor on the device")


class ApartMode(TorchDispatchMode):
    """Inside of it tensors can be made on the device. waits: copies to it for which the host of a GPU waits, and so for
    all that was launched before."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name, given = _run(func, args, kwargs or {}), str(func), (*args, *(kwargs or {}).values())
        is_copy = name.startswith(_COPIES) and isinstance(result, ApartTensor)
        source = args[name.startswith("aten.copy_.")] if is_copy else None
        # numbers go with the launches of what reads them
        is_of_host = isinstance(source, Tensor) and not isinstance(source, ApartTensor) and source.dim() > 0
        if is_of_host and not any(each is True for each in given):
            self.waits.append(f"{name} of {tuple(source.shape)}")
        return result


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    # mostly a keyword
    targets = [each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device)]
    name, target = str(func), targets[0] if targets else None
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
    apart = [each for each in tensors if isinstance(each, ApartTensor)]
    of_host = [each for each in tensors if not isinstance(each, ApartTensor) and each.dim()]
    is_move = name.startswith(_MOVES) or "_like." in name
    has_indexes = name.startswith(_INDEXED) and isinstance(args[0], ApartTensor)
    if apart and of_host and not is_move and not has_indexes:
        shapes = [(type(each).__name__, *each.shape) for each in tensors]
        raise MixedDevices(f"{name}: {shapes}")
    is_apart = bool(apart) if target is None else torch.device(target).type == NAME
    if name.startswith("aten.copy_."):
        is_apart = isinstance(args[0], ApartTensor)
    known = {id(each.inside): each for each in apart}

    def opened(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        return value.inside if isinstance(value, ApartTensor) else value

    result = func(*tree_map(opened, args), **tree_map(opened, kwargs))

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, ApartTensor):
            return value
        if id(value) in known:  # written to in its place, or moved to where it is
            return known[id(value)] if target is None or is_apart else value.clone()
        return ApartTensor(value) if is_apart else value

    return tree_map(wrapped, result)
