"""Functions of torch whose bits depend on a row's neighbours, computed so that they do not.

torch computes elements in vectors and those left at the end one by one, with other roundings in the functions of
`_OF_ELEMENTS`; so where an element lies in its tensor shows in its bits. A product of few rows sums in another order
than one of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_VECTOR: Final = 64
"""Elements: a multiple of the number that torch computes at once with any instruction set."""
_PIECE: Final = 1 << 15
"""Elements that torch computes in one thread."""

_ROWS: Final = 32

_OF_ELEMENTS: Final = frozenset(
    {"sigmoid", "silu", "gelu", "softplus", "rsqrt", "exp2", "mish", "elu", "selu", "celu", "pow", "__pow__"}
)
_PRODUCTS: Final = frozenset(
    {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "addmm", "baddbmm", "addbmm", "einsum", "tensordot", "mv"}
    | {"conv1d", "conv2d", "scaled_dot_product_attention", "bilinear", "inner", "dot", "linalg_matmul"}
)

REPLACED: Final = frozenset({"Conv1D"})
"""Classes of transformers whose products octavo's layers compute."""


class Watch(TorchFunctionMode):
    """Notes which modules call functions that `Exact` replaces, and raises `refuse` where it has nothing for them."""

    def __init__(self, root: nn.Module, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self.modules = [root]
        """The modules that are being called, the innermost last."""
        self.callers: set[nn.Module] = set()
        """The innermost module of each call."""
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        caller = self.modules[-1]
        if name in _PRODUCTS and not _is_outer(args) and type(caller).__name__ not in REPLACED:
            raise self._refuse(f"{type(caller).__name__} computes {name}, whose bits depend on the batch")
        if name in _OF_ELEMENTS or name == "linear":
            self.callers.add(caller)
        return func(*args, **(kwargs or {}))


def _is_outer(args: tuple[Any, ...]) -> bool:
    """Return whether a product of two tensors sums nothing up."""
    return len(args) > 1 and isinstance(args[0], Tensor) and args[0].shape[-1] == 1


class _Exact(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name == "linear":
            return _linear(*args, **(kwargs or {}))
        if name in _OF_ELEMENTS and isinstance(args[0], Tensor):
            return _of_elements(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply the same number of rows in each call, which torch does in the same way each time."""
    rows = x.reshape(-1, x.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _ROWS))
    found = torch.cat([F.linear(each, weight, bias) for each in torch.split(padded, _ROWS)])
    return found[: len(rows)].view(*x.shape[:-1], len(weight))


def _of_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    broadcast: Any = torch.broadcast_tensors
    tensors: list[Tensor] = broadcast(*(each for each in args if isinstance(each, Tensor)))
    shape, rest = tensors[0].shape, [each for each in args if not isinstance(each, Tensor)]
    missing = -shape.numel() % _VECTOR
    flat = [F.pad(each.reshape(-1), (0, missing), value=1.0) if missing else each.reshape(-1) for each in tensors]
    pieces = [flat] if torch.get_num_threads() == 1 else zip(*(torch.split(each, _PIECE) for each in flat), strict=True)
    found = torch.cat([func(*piece, *rest, **kwargs) for piece in pieces])
    return found[: shape.numel()].view(shape)


def make_exact(module: nn.Module) -> None:
    """Let the module, with all that is in it, compute bits that do not depend on a row's neighbours."""
    forward = module.forward

    def exact(*args: Any, **kwargs: Any) -> Any:
        with _Exact():
            return forward(*args, **kwargs)

    module.forward = exact
