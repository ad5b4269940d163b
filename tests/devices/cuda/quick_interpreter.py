"""Triton's interpreter without what it does again for every operation: half of the time of these tests and more.

It looks through the whole language for each call of a function of a kernel, and undoes at the end of a launch what it
has found. Types, their shapes and what they are in NumPy are made anew for each value.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import triton.language as tl
import triton.language.semantic as semantic
import triton.runtime.interpreter as interpreter


def install() -> None:
    """Let the interpreter of this process keep what it has found out about functions and types."""
    module: Any = interpreter
    _patch_each_function_once(module)
    module._patch_attr = _patch_attribute
    _keep_types(module)
    # five operations for each sum of integers, whose result is asserted in debugging alone
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    # launches run one after the other: there is nothing to wait for
    of_gpus: Any = import_module("triton.language.extra.cuda")  # which the attribute `cuda` of the package is not
    of_gpus.gdc_wait = of_gpus.gdc_launch_dependents = lambda: None


def _patch_each_function_once(module: Any) -> None:
    plain, known = module._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if function not in known:
            known.add(function)
            plain(function)
        return module._LangPatchScope()

    module._patch_lang = patch_once


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    function = getattr(member, "__wrapped__", member)

    def call(*arguments: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **keywords)

    scope.set_attr(owner, name, call)


def _keep_types(module: Any) -> None:
    plain_numpy_type, plain_block_type = module._get_np_dtype, tl.block_type.__init__
    plain_broadcast = semantic.TritonSemantic.broadcast_impl_value
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.name
        if name not in numpy_types:
            numpy_types[name] = plain_numpy_type(kind)
        return numpy_types[name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, sizes
        if key not in blocks:
            plain_block_type(self, element_ty, shape)
            if sizes not in shapes:
                shapes[sizes] = self.shape, tl.constexpr(self.numel), tl.tuple([tl.constexpr(size) for size in sizes])
            same, *of_tensors = shapes[sizes]
            blocks[key] = {"shape": same, "numel": self.numel, "name": self.name, "of_tensors": of_tensors}
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = kind.of_tensors

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        is_done = getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None)
        return (lhs, rhs) if is_done else plain_broadcast(self, lhs, rhs)

    module._get_np_dtype = numpy_type
    tl.dtype.of_tensors = tl.constexpr(1), tl.tuple([])  # type: ignore[attr-defined]
    tl.block_type.__init__ = block_type  # type: ignore[method-assign]
    tl.tensor.__init__ = tensor  # type: ignore[method-assign]
    semantic.TritonSemantic.broadcast_impl_value = broadcast  # type: ignore[method-assign]
