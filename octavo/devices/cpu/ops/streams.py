"""Several streams of a decoder beside each other. More of them than the kernels take are left to the references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime
from octavo.ops import streams as reference
from octavo.ops.registry import Implementation

_MOST_STREAMS = 8
_PREDICTED, _CORRECTED, _ADDED, _SPREAD, _MEAN, _LARGEST_GATES = range(6)


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a kernel: `count` streams of width `dim`, and the tensors that belong to them."""

    parts: Sequence[Tensor]
    count: int
    dim: int
    states: Tensor | None = None
    weight: Tensor | None = None
    active: int = 0
    deviations: float = 0.0


def _predicted(x: Tensor, states: Tensor, weight: Tensor) -> _Call:
    count = states.shape[1]
    return _Call([x], count, x.shape[1] // count, states, weight)


def _corrected(x: Tensor, computed: Tensor, states: Tensor, weight: Tensor, active: int) -> _Call:
    return _Call([x, computed], states.shape[1], computed.shape[1], states, weight, active)


def _added(x: Tensor, y: Tensor) -> _Call:
    return _Call([x, y], x.shape[1] // y.shape[1], y.shape[1])


def _streams(*parts: Tensor) -> _Call:
    return _Call(parts, len(parts), parts[0].shape[1])


def _gates(x: Tensor, deviations: float) -> _Call:
    return _Call([x], 1, x.shape[1], deviations=deviations)


def make(
    function: int, read: Callable[..., _Call], reference: Callable[..., Tensor], runtime: CpuRuntime
) -> Callable[..., Tensor]:
    """Make an operator by the library's number. read: takes its arguments."""
    kernel, empty, is_one = runtime.cpu.streams, runtime.empty, function == _MEAN

    def compute(*arguments: Tensor | float) -> Tensor:
        call = read(*arguments)
        first, dtype = call.parts[0], call.parts[0].dtype
        typed = [each for each in (*call.parts, call.weight) if each is not None]
        if dtype not in FLOAT_TYPES or call.count > _MOST_STREAMS or any(each.dtype is not dtype for each in typed):
            return reference(*arguments)
        out = empty((len(first), call.dim if is_one else call.count * call.dim), dtype)
        others = [0 if each is None else each.data_ptr() for each in (call.states, call.weight)]
        parts = [each.data_ptr() for each in call.parts], [each.stride(0) for each in call.parts]
        sizes = len(first), call.count, call.dim, call.active, call.deviations
        kernel(function, *parts, *others, out.data_ptr(), *sizes, TYPE_CODES[dtype])
        return out

    return compute


IMPLEMENTATIONS = tuple(
    Implementation(function.__name__, "native", partial(make, number, read, function))
    for number, read, function in (
        (_PREDICTED, _predicted, reference.predicted_streams),
        (_CORRECTED, _corrected, reference.corrected_streams),
        (_ADDED, _added, reference.add_to_others),
        (_SPREAD, _streams, reference.spread_streams),
        (_MEAN, _streams, reference.mean_stream),
        (_LARGEST_GATES, _gates, reference.largest_gates),
    )
)
