"""Hyper-connections. Other types, and more streams than the kernels take, are left to the references."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, lacks
from octavo.ops import hyper as reference
from octavo.ops.hyper import Mixing
from octavo.ops.registry import Implementation

_MOST_STREAMS: Final = 8
_WEIGHED, _MIXED, _NORMED, _REPEATED = range(4)


class _Mixings:
    """The weights with which blocks read and write streams, by one kernel."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self._kernel, self._empty = runtime.cpu.hyper_mixing, runtime.empty

    def weights(self, products: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
        """`octavo.ops.hyper.stream_weights`."""
        count = products.shape[1]
        if count > _MOST_STREAMS:
            return reference.stream_weights(products, scale, base, eps)
        read = self._empty((len(products), count), torch.float32)
        self._call(products, scale, base, (read, None, None), (0, eps, 1.0))
        return read

    def mixing(self, products: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float) -> Mixing:
        """`octavo.ops.hyper.stream_mixing`."""
        count = reference.num_mixed(products)
        if count > _MOST_STREAMS:
            return reference.stream_mixing(products, scale, base, rounds, eps)
        return self._mixing(products, scale, base, count, (rounds, eps, 2.0))

    def plain(self, products: Tensor, scale: Tensor, base: Tensor, most: float, eps: float) -> Mixing:
        """`octavo.ops.hyper.plain_mixing`."""
        count = products.shape[1] // 2
        if count > _MOST_STREAMS:
            return reference.plain_mixing(products, scale, base, most, eps)
        return self._mixing(products, scale, base, count, (0, eps, most))

    def _mixing(
        self, products: Tensor, scale: Tensor, base: Tensor, count: int, numbers: tuple[int, float, float]
    ) -> Mixing:
        tokens = len(products)
        made = Mixing(*(self._empty((tokens, *shape), torch.float32) for shape in ((count,), (count,), (count, count))))
        self._call(products, scale, base, made, numbers)
        return made

    def _call(
        self,
        products: Tensor,
        scale: Tensor,
        base: Tensor,
        made: tuple[Tensor, Tensor | None, Tensor | None],
        numbers: tuple[int, float, float],
    ) -> None:
        """numbers: rounds, eps, and the most that a stream gets of the output."""
        out = [0 if each is None else each.data_ptr() for each in made]
        places = products.data_ptr(), products.stride(0), scale.data_ptr(), base.data_ptr()
        self._kernel(*places, *out, len(products), made[0].shape[1], *numbers)


class _Streams:
    """Functions of streams, by one kernel."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self._kernel, self._empty = runtime.cpu.hyper_streams, runtime.empty

    def weighed(self, x: Tensor, weights: Tensor) -> Tensor:
        """`octavo.ops.hyper.weighed_stream`."""
        tokens, count = weights.shape
        if count > _MOST_STREAMS or x.dtype not in FLOAT_TYPES:
            return reference.weighed_stream(x, weights)
        dim = x.shape[1] // count
        out = self._empty((tokens, dim), x.dtype)
        places = x.data_ptr(), x.stride(0), 0, 0, weights.data_ptr(), weights.stride(0), 0, out.data_ptr()
        self._kernel(_WEIGHED, *places, tokens, count, dim, 0.0, TYPE_CODES[x.dtype])
        return out

    def mixed(self, x: Tensor, out: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        """`octavo.ops.hyper.mixed_streams`."""
        tokens, count = write.shape
        if count > _MOST_STREAMS or x.dtype not in FLOAT_TYPES or out.dtype is not x.dtype:
            return reference.mixed_streams(x, out, write, mix)
        made, mix = self._empty(x.shape, x.dtype), dense(mix)
        places = x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), write.data_ptr(), write.stride(0)
        sizes = tokens, count, out.shape[1], 0.0, TYPE_CODES[x.dtype]
        self._kernel(_MIXED, *places, mix.data_ptr(), made.data_ptr(), *sizes)
        return made

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`octavo.ops.hyper.normed_streams`."""
        if x.dtype not in FLOAT_TYPES:
            return reference.normed_streams(x, weight, eps)
        out = self._empty(x.shape, torch.float32)
        places = x.data_ptr(), x.stride(0), 0, 0, weight.data_ptr(), 0, 0, out.data_ptr()
        self._kernel(_NORMED, *places, len(x), 1, x.shape[1], eps, TYPE_CODES[x.dtype])
        return out

    def repeated(self, x: Tensor, count: int) -> Tensor:
        """`octavo.ops.hyper.repeated_streams`."""
        if x.dtype not in FLOAT_TYPES:
            return reference.repeated_streams(x, count)
        out = self._empty((len(x), count * x.shape[1]), x.dtype)
        places = x.data_ptr(), x.stride(0), 0, 0, 0, 0, 0, out.data_ptr()
        self._kernel(_REPEATED, *places, len(x), count, x.shape[1], 0.0, TYPE_CODES[x.dtype])
        return out


def _made(kind: type[_Mixings | _Streams], name: str, runtime: CpuRuntime) -> Callable[..., Tensor | Mixing]:
    function: Callable[..., Tensor | Mixing] = getattr(kind(runtime), name)
    return function


IMPLEMENTATIONS = tuple(
    Implementation(operator, "native", partial(_made, kind, name), lacks("hyper_streams"))
    for operator, kind, name in (
        ("stream_weights", _Mixings, "weights"),
        ("stream_mixing", _Mixings, "mixing"),
        ("plain_mixing", _Mixings, "plain"),
        ("weighed_stream", _Streams, "weighed"),
        ("mixed_streams", _Streams, "mixed"),
        ("normed_streams", _Streams, "normed"),
        ("repeated_streams", _Streams, "repeated"),
    )
)
