"""What compute-sanitizer would look for on a GPU, for kernels in Triton's interpreter, which hides it: there programs
run one at a time and in order, threads of a program do too, and memory around tensors can be read.

`sanitized` runs each launch twice: in ascending order, and again over the same memory in another order of programs. It
reports

- accesses outside of the tensors that the launch was given, and of those that one of them `points_to`;
- memory that a program writes and another one writes or reads, without an atomic with release by the first and one with
  acquire by the other in between;
- memory that a program writes and reads, or writes twice, by different threads without `tl.debug_barrier` in between;
- stores without a barrier before the atomic that publishes them: one thread executes it, others may not have stored;
- results that change with the order of programs;
- sums and products of int32 that overflow.

Tensors of torch.empty are filled with NaN, or the largest integer. An element of a block that is read and then written
belongs to one thread, if there are as many elements as all threads read at once; those of smaller blocks, as scalars,
are read by several threads and written by one.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.runtime.interpreter as interpreter
from numpy.typing import NDArray
from torch.utils._device import _device_constructors
from triton._C.libtriton import ir

IN_ANY_ORDER = frozenset({"collect", "narrow"})
"""Kernels whose lists have any order, of which nothing that is found in them depends."""
_HIDDEN = (str(Path(triton.__file__).parent), str(Path(__file__).parent / "quick_interpreter.py"), __file__)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_MOST_FILLED = 1 << 28
"""Bytes; larger tensors of torch.empty take no memory before they are written, and stay so."""


@dataclass
class Report:
    """faults: places in kernels, and examples. benign: equal values that several programs write to one place. counts:
    of what was seen."""

    faults: dict[str, str] = field(default_factory=dict)
    benign: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


_reports: list[Report] = []
"""The last one is that of the innermost `sanitized`."""


class _Access(NamedTuple):
    """clock: releases of the program before it, and one. known: up to which clocks of others what they did happened
    before it. places, lanes, values: of each byte. is_repeated: whether several threads have each element."""

    kind: str
    program: int
    barriers: int
    clock: int
    known: Mapping[int, int]
    places: NDArray[np.int64]
    lanes: NDArray[np.int64]
    values: NDArray[np.uint8]
    is_repeated: bool
    line: str


class _Run:
    """The programs of a launch, once, in an order. written: storages of which reads are kept for `races`."""

    def __init__(
        self,
        kernel: str,
        num_warps: int,
        tensors: Mapping[str, torch.Tensor],
        order: Callable[[int], list[int]],
        written: set[int],
    ) -> None:
        self.kernel, self.written, self._order = kernel, written, order
        self._bytes_at_once, self._names = num_warps * 32 * 16, list(tensors)
        self._starts = np.array([each.data_ptr() for each in tensors.values()])
        self._ends = self._starts + [_extent(each) for each in tensors.values()]
        self._storages = np.array([each.untyped_storage().data_ptr() for each in tensors.values()])
        self._undo: list[tuple[NDArray[np.int64], NDArray[np.uint8]]] = []
        self.accesses: dict[int, list[_Access]] = defaultdict(list)
        self._released: dict[int, dict[int, int]] = defaultdict(dict)

    def grid(self, *sizes: int) -> None:
        self.sizes, self._next = sizes, iter(self._order(int(np.prod(sizes))))

    def begin(self) -> tuple[int, ...]:
        """Begin the next program and return its place in the grid."""
        self._program, self._clock, self._known = next(self._next), 1, dict[int, int]()
        self._barriers, self._has_stored = 0, False
        return self._place(self._program)

    def _place(self, program: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(program, self.sizes)))

    def barrier(self) -> None:
        self._barriers, self._has_stored = self._barriers + 1, False

    def fault(self, line: str, what: str, detail: str = "", program: int | None = None) -> None:
        place = self._place(self._program if program is None else program)
        found = _reports[-1].benign if detail.startswith("equal") else _reports[-1].faults
        found.setdefault(f"{self.kernel}, {line}: {what}", f"{detail} in program {place}")

    def access(self, kind: str, pointers: Any, mask: Any, values: Any = None, sem: Any = None) -> Any:
        """Note an access and return the mask of what lies in tensors. values: what is stored."""
        size, line = max(pointers.get_element_ty().primitive_bitwidth // 8, 1), _line()
        lanes = np.flatnonzero(mask.data)
        addresses = pointers.data.reshape(-1)[lanes].astype(np.int64)
        _reports[-1].counts.update({f"{kind}s": 1, f"elements of {kind}s": len(lanes)})
        inside = (addresses[:, None] >= self._starts) & (addresses[:, None] + size <= self._ends)
        fine, storages = inside.any(1), self._storages[inside.argmax(1)]
        raw = np.zeros(mask.data.size, f"u{size}") if values is None else np.broadcast_to(values.data, mask.data.shape)
        of_bytes = np.ascontiguousarray(raw).reshape(-1)[lanes].view(np.uint8).reshape(-1, size)
        for storage in np.unique(storages[fine]).tolist():
            own = fine & (storages == storage)
            places, repeats = addresses[own][:, None] + np.arange(size), np.repeat(lanes[own], size)
            more = places.ravel(), repeats, of_bytes[own].ravel(), mask.data.size * size < self._bytes_at_once, line
            self._keep(storage, _Access(kind, self._program, self._barriers, self._clock, self._known, *more))
        if not fine.all():
            outside = int(addresses[~fine][0])
            near = np.maximum(self._starts - outside, outside - self._ends).argmin()
            where = f"{outside - self._starts[near]} bytes from the start of {self._names[near]}"
            self.fault(line, f"{kind} outside of all tensors", where)
            kept = np.zeros(mask.data.size, bool)
            kept[lanes[fine]] = True
            mask = interpreter.TensorHandle(kept.reshape(mask.data.shape), mask.dtype)
        if kind == "atomic":
            self._synchronise(addresses.tolist(), sem, line)
        return mask

    def _keep(self, storage: int, access: _Access) -> None:
        if access.kind != "load":
            self._has_stored |= access.kind == "store"
            self._undo.append((access.places, _read(access.places)))
        if access.kind != "load" or storage in self.written:
            self.accesses[storage].append(access)

    def _synchronise(self, addresses: list[int], sem: Any, line: str) -> None:
        if sem in _RELEASES and self._has_stored:
            self.fault(line, "no barrier between a store and the atomic that publishes it")
        own = {**self._known, self._program: self._clock}
        for released in (self._released[each] for each in addresses):
            if sem in _RELEASES:
                released.update({each: max(clock, released.get(each, 0)) for each, clock in own.items()})
            if sem in _ACQUIRES:
                more = {each: max(clock, self._known.get(each, 0)) for each, clock in released.items()}
                self._known = {**self._known, **more}
        self._clock += sem in _RELEASES

    def results(self) -> NDArray[np.uint8]:
        """Return the bytes of what was written, in the order of addresses."""
        return _read(np.unique(np.concatenate([np.zeros(0, np.int64), *(places for places, _ in self._undo)])))

    def restore(self) -> None:
        """Write back what was there before."""
        for places, before in reversed(self._undo):
            pointers = places[::-1].astype(np.uint64)
            interpreter._interpreter.store(pointers, before[::-1].copy(), np.ones(len(places), bool))

    def races(self) -> None:
        """Report pairs of accesses to the same bytes that nothing orders."""
        for accesses in self.accesses.values():
            for (first, second), (same_lanes, same_values) in _pairs(accesses).items():
                self._judge(accesses[first], accesses[second], same_lanes=same_lanes, same_values=same_values)

    def _judge(self, a: _Access, b: _Access, *, same_lanes: bool, same_values: bool) -> None:
        is_stored = a.kind == b.kind == "store"
        what = f"{a.kind} in {a.line} and {b.kind}"
        if a.kind == b.kind and not is_stored:
            return
        if a.program != b.program:
            if b.known.get(a.program, 0) < a.clock:
                detail = "equal values" if is_stored and same_values else ""
                self.fault(b.line, f"race of programs, {what}", f"{detail} with {self._place(a.program)}", b.program)
        elif a is b:
            if not same_values:
                self.fault(b.line, "one store of different values to one place", "", b.program)
        elif a.barriers == b.barriers:
            is_one_thread = same_lanes and b.kind != "load" and not (a.kind == "load" and a.is_repeated)
            if not is_one_thread:
                self.fault(b.line, f"no barrier between {what}", "", b.program)


def _pairs(accesses: list[_Access]) -> dict[tuple[int, int], tuple[bool, bool]]:
    """Return which accesses are to the same bytes, and whether by the same lanes and of equal values everywhere."""
    places, lanes, values = (
        np.concatenate([getattr(each, name) for each in accesses]) for name in ("places", "lanes", "values")
    )
    owners = np.repeat(np.arange(len(accesses)), [len(each.places) for each in accesses])
    kinds = np.array([each.kind for each in accesses])[owners]
    of_place = np.unique(places, return_inverse=True)[1]
    num, loads, atomics = (np.bincount(of_place, weights=each) for each in (None, kinds == "load", kinds == "atomic"))
    kept = np.flatnonzero(((num > 1) & (num > loads) & (num > atomics))[of_place])
    order = kept[np.argsort(places[kept], kind="stable")]
    places, owners, lanes, values = (each[order] for each in (places, owners, lanes, values))
    found: dict[tuple[int, int], tuple[bool, bool]] = {}
    for step in range(1, int(num[of_place[kept]].max(initial=0))):
        same = np.flatnonzero(places[step:] == places[:-step])
        keys = owners[same] * len(accesses) + owners[same + step]
        for key in np.unique(keys).tolist():
            at, pair = same[keys == key], divmod(key, len(accesses))
            lane, value = (bool((each[at] == each[at + step]).all()) for each in (lanes, values))
            before = found.get(pair, (True, True))
            found[pair] = before[0] and lane, before[1] and value
    return found


def _read(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    num = len(places)
    found: NDArray[np.uint8] = interpreter._interpreter.load(
        places.astype(np.uint64), np.ones(num, bool), np.zeros(num, np.uint8), np.dtype(np.uint8)
    )
    return found


def _line() -> str:
    """Return the line of the kernel that is being interpreted."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _extent(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


_run: _Run | None = None
"""The launch that is being interpreted."""


@contextmanager
def sanitized(seed: int = 0) -> Iterator[Report]:
    """Watch what is launched meanwhile, and yield what is found. seed: of orders of programs."""
    builder, source = interpreter.InterpreterBuilder, random.Random(seed)
    _reports.append(Report())
    with pytest.MonkeyPatch.context() as patch:
        if len(_reports) == 1:
            _watch(patch, builder, source)
        try:
            yield _reports[-1]
        finally:
            _reports.pop()


def _watch(patch: pytest.MonkeyPatch, builder: Any, source: random.Random) -> None:
    for name, *where in (("load", 0, 1), ("store", 0, 2, 1)):
        patch.setattr(builder, f"create_masked_{name}", _noted(getattr(builder, f"create_masked_{name}"), name, *where))
    patch.setattr(builder, "create_atomic_rmw", _noted(builder.create_atomic_rmw, "atomic", 1, 3, None, 4))
    for name in ("create_add", "create_sub", "create_mul"):
        patch.setattr(builder, name, _checked(getattr(builder, name)))
    set_sizes, set_place, barrier = builder.set_grid_dim, builder.set_grid_idx, builder.create_barrier
    patch.setattr(builder, "set_grid_dim", lambda self, *sizes: (_current().grid(*sizes), set_sizes(self, *sizes)))
    patch.setattr(builder, "set_grid_idx", lambda self, *_: set_place(self, *_current().begin()))
    patch.setattr(builder, "create_barrier", lambda self: (_current().barrier(), barrier(self)))
    patch.setattr(interpreter.GridExecutor, "__call__", _launched_twice(source))
    _device_constructors()  # keeps the functions that there are when it is first called
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, _filled(getattr(owner, name)))


def _current() -> _Run:
    assert _run is not None
    return _run


def _launched_twice(source: random.Random) -> Callable[..., None]:
    plain = interpreter.GridExecutor.__call__

    def ascending(num: int) -> list[int]:
        return list(range(num))

    def shuffled(num: int) -> list[int]:
        return source.sample(range(num), num) if source.random() < 0.5 else ascending(num)[::-1]

    def launch(self: Any, *arguments: Any, **constants: Any) -> None:
        given = {name: interpreter._unwrap_tensor(each) for name, each in zip(self.arg_names, arguments, strict=False)}
        tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
        for name in list(tensors):  # a table of pointers says to which tensors
            pointed = getattr(tensors[name], "points_to", ())
            tensors |= {f"{name}[{number}]": each for number, each in enumerate(pointed)}

        def run(order: Callable[[int], list[int]], written: set[int]) -> _Run:
            global _run
            made = _run = _Run(self.fn.__name__, constants.get("num_warps", 4), tensors, order, written)
            try:
                plain(self, *arguments, **constants)
            finally:
                _run = None
            return made

        first = run(ascending, set())
        expected = first.results()
        first.restore()
        again = run(shuffled, set(first.accesses))
        again.races()
        report = _reports[-1]
        report.counts.update({"launches": 1, "programs": int(np.prod(again.sizes))})
        if first.kernel not in IN_ANY_ORDER and not np.array_equal(expected, again.results()):
            report.faults.setdefault(f"{first.kernel}: results change with the order of programs", f"{again.sizes}")

    return launch


def _noted(plain: Any, kind: str, at: int, mask: int, value: int | None = None, sem: int | None = None) -> Any:
    """Return the operation that notes what it accesses. The numbers are places among its arguments."""

    def access(self: Any, *arguments: Any) -> Any:
        given = list(arguments)
        value_and_sem = (None if place is None else given[place] for place in (value, sem))
        given[mask] = _current().access(kind, given[at], given[mask], *value_and_sem)
        return plain(self, *given)

    return access


def _checked(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operation on integers that reports where its result leaves int32."""

    def check(self: Any, lhs: Any, rhs: Any) -> Any:
        found = plain(self, lhs, rhs)
        if lhs.data.dtype == np.int32 and _run is not None:
            wide = [interpreter.TensorHandle(each.data.astype(np.int64), triton.language.int64) for each in (lhs, rhs)]
            if not np.array_equal(plain(self, *wide).data, found.data):
                _run.fault(_line(), "a result leaves int32")
        return found

    return check


def _filled(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        made = plain(*arguments, **keywords)
        if not made.is_meta and 0 < made.nbytes < _MOST_FILLED:
            is_number = made.is_floating_point() or made.dtype is torch.bool
            made.detach().fill_(float("nan") if is_number else torch.iinfo(made.dtype).max)
        return made

    return make
