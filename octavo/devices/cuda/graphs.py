"""Decode steps from CUDA graphs: the host launches one graph instead of hundreds of kernels.

A graph repeats its kernels on the same addresses, with the numbers that the host gave them. So a captured step reads
tensors that stay in their place, into which those of each step are copied, and instead of the length of the longest
sequence it has a bound, a power of 2 of chunks. Chunks beyond the end of a sequence are skipped on the device, and
change no bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from octavo.attention.metadata import IntermediateTensors, ModelInput
from octavo.devices.cuda.attention import CHUNK, LONGEST
from octavo.devices.cuda.runtime import power_of_2
from octavo.devices.device import LanguageModel
from octavo.devices.watch import Watch, watched

_log = logging.getLogger(__name__)

MAX_ROWS: Final = 256
"""Steps of more rows are launched by the host: their kernels take longer than their launches."""
MAX_GRAPHS: Final = 256
"""Most graphs that are kept; the least recently used one is dropped."""

_IN_METADATA: Final = ("query_starts", "sequence_lengths", "block_tables", "slot_mapping")
"""The tensors of `AttentionMetadata`."""


class Graph:
    """Kernels that were captured, and can be launched again together. Graphs that share memory run one at a time."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], object]) -> None:
        """Capture what `run` launches; nothing is computed. Raises RuntimeError for what cannot be captured."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # other threads may use the GPU meanwhile
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken, which is known already
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        """Launch the kernels."""
        self._graph.replay()


@dataclass(slots=True)
class _Step:
    """A step that is captured, or will be. batch: its tensors keep their addresses. bounds: of the lengths, for each
    cache group."""

    batch: ModelInput
    bounds: Sequence[int]
    is_warm: bool = False
    """Whether the host has launched its kernels."""
    graph: Graph | None = None
    asked: Tensor | None = None
    """The sampling parameters of a step that draws, on the device."""
    told: Tensor | None = None
    """The result of the draw, in the graph's memory, which the next graph may overwrite."""


Rooms = dict[tuple[int, torch.dtype], Tensor]
"""The memory of the tensors that steps read, by places and types. All steps share it, because one runs at a time."""


def _copied(rooms: Rooms, place: int, tensor: Tensor) -> Tensor:
    """Return a copy of the tensor at this place of a step's tensors. One that is larger than all before it gets new
    memory; captured steps keep the memory that they read."""
    key, size = (place, tensor.dtype), tensor.numel()
    room = rooms.get(key)
    if room is None or room.numel() < size:
        room = rooms[key] = tensor.new_empty(power_of_2(size))
    return room[:size].view(tensor.shape).copy_(tensor)


class GraphedModel:
    """A model whose decode steps are captured when a number of rows and a bound of lengths come for the second time.

    The first time their kernels are launched by the host, with the numbers that they will be captured with, so that all
    of them are compiled and loaded. A model that reads values on the host while it runs is never captured; a line in
    the log says what reads them.
    """

    def __init__(self, model: LanguageModel, make_graph: Callable[[], Graph], *, is_shared: bool = False) -> None:
        """is_shared: whether other ranks have parts of the model, which may be captured where this one is not."""
        self._model, self._is_shared = model, is_shared
        self._make_graph = make_graph
        self._steps: dict[tuple[Hashable, ...], _Step] = {}
        """The steps by size, the least recently used one first."""
        self._rooms: Rooms = {}
        self._results: Any = None
        """What the model returns, with MAX_ROWS rows: graphs write its results here."""
        self._is_capturable = True
        self.compute_logits = model.compute_logits

    def __call__(self, batch: ModelInput) -> Any:
        """Return what the model does, valid until the next step."""
        step = self._taken(batch)
        if step is None:
            return self._model(batch)
        if not step.is_warm:
            return self._launch(step)
        if not self._is_captured(step, lambda: self._write_results(step)):
            return self._model(batch)
        rows = len(batch.token_ids)
        return tree_map_only(Tensor, lambda each: each[:rows], self._results)

    def padded(self, num_rows: int) -> int:
        # ranks exchange rows: all must have the same number, whatever each of them captures
        if num_rows > MAX_ROWS or not (self._is_capturable or self._is_shared):
            return num_rows
        step = 1 if num_rows <= 2 else 4 if num_rows <= 4 else 8 if num_rows <= 64 else 16
        return -(-num_rows // step) * step

    def draw(
        self, batch: ModelInput, asked: NDArray[np.float64], key: Hashable, draw: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        step = self._taken(batch, key)
        if step is None:
            return None
        if step.asked is None:
            step.asked = torch.empty(asked.shape, dtype=torch.float64, device=batch.token_ids.device)
        own = step.asked.copy_(torch.from_numpy(asked), non_blocking=True)
        if not step.is_warm:
            hidden = self._launch(step)
            return draw(self.compute_logits(hidden), own) if isinstance(hidden, Tensor) else None

        def launch() -> None:
            step.told = draw(self.compute_logits(self._model(_bounded(step, lambda _: None))), own)

        return step.told if self._is_captured(step, launch) else None

    def _taken(self, batch: ModelInput, more: Hashable = None) -> _Step | None:
        """Return the step for a batch, which is copied into it, or a new one; None for a batch that is not captured.

        more: a key that the step must share with the batch beside its shape.
        """
        is_decode = batch.is_plain and len(batch.token_ids) == len(batch.attention[0].lengths)
        if not self._is_capturable or not is_decode or len(batch.token_ids) > MAX_ROWS:
            return None
        bounds = [CHUNK * power_of_2(-(-max(each.lengths) // CHUNK), least=1) for each in batch.attention]
        widths = [each.block_tables.shape[1] for each in batch.attention]
        key = (len(batch.token_ids), *bounds, *widths, batch.packed is None, more)
        step = self._steps.pop(key, None)
        if step is None:
            step = _Step(_placed(batch, self._rooms), bounds)
            if len(self._steps) == MAX_GRAPHS:
                del self._steps[next(iter(self._steps))]
        else:
            for own, new in zip(_memories(step.batch), _memories(batch), strict=True):
                own.copy_(new)
        self._steps[key] = step
        return step

    def _launch(self, step: _Step) -> Any:
        """Launch a step's kernels, and find reads of values on the host, which a graph could not repeat."""
        watch, step.is_warm = _HostReads(), True
        with watch:
            found = self._model(_bounded(step, watch.meet))
        if watch.obstacle is not None:
            self._give_up(watch.obstacle)
        elif self._results is None:
            self._results = tree_map_only(Tensor, lambda each: each.new_empty((MAX_ROWS, *each.shape[1:])), found)
        return found

    def _write_results(self, step: _Step) -> None:
        found, rows = self._model(_bounded(step, lambda _: None)), len(step.batch.token_ids)
        for result, part in zip(tree_leaves(self._results), tree_leaves(found), strict=True):
            if part is not None:  # a stage may send no residual
                result[:rows].copy_(part)

    def _is_captured(self, step: _Step, launch: Callable[[], None]) -> bool:
        """Launch a step's graph, after capturing it if there is none; return whether it could be captured."""
        if step.graph is None:
            graph = self._make_graph()
            try:
                graph.capture(launch)
            except RuntimeError as error:
                self._give_up(str(error).partition("\n")[0])
                return False
            step.graph = graph
        step.graph.replay()
        return True

    def _give_up(self, reason: str) -> None:
        self._is_capturable = False
        self._steps.clear()
        _log.info("decode steps are not captured as CUDA graphs: %s", reason)


def _memories(batch: ModelInput) -> list[Tensor]:
    """Return the tensors that differ from step to step, each once; those that are part of `packed` are not named."""
    apart = [batch.token_ids, *(() if batch.received is None else batch.received.parts)]
    if batch.packed is not None:
        return [batch.packed, *apart]
    of_groups = [getattr(each, name) for each in batch.attention for name in _IN_METADATA]
    return list({id(each): each for each in (*apart, batch.positions, *of_groups)}.values())


def _placed(batch: ModelInput, rooms: Rooms) -> ModelInput:
    """Return the batch copied into this memory."""
    own = {id(each): _copied(rooms, place, each) for place, each in enumerate(_memories(batch))}

    def placed(tensor: Tensor) -> Any:
        if id(tensor) in own:
            return own[id(tensor)]
        # where it is in the memory of which this is a copy
        packed = own[id(batch.packed)].view(tensor.dtype)
        return packed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    received = None if batch.received is None else IntermediateTensors(*map(placed, batch.received.parts))
    return replace(
        batch,
        token_ids=placed(batch.token_ids),
        positions=placed(batch.positions),
        attention=[
            replace(each, **{name: placed(getattr(each, name)) for name in _IN_METADATA}) for each in batch.attention
        ],
        received=received,
        packed=None if batch.packed is None else placed(batch.packed),
    )


def _bounded(step: _Step, meet: Callable[[str], None]) -> ModelInput:
    """Return the step's batch with bounds in place of its longest lengths, and without cached values of another run."""
    return watched(step.batch, meet, [{LONGEST: bound} for bound in step.bounds])


_READS: Final = frozenset(
    {
        *("__bool__", "__contains__", "__float__", "__index__", "__int__", "argwhere", "as_tensor", "bincount", "cpu"),
        *("equal", "from_numpy", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tensor", "tolist"),
        *("unique", "unique_consecutive"),
    }
)
"""Functions of torch that wait for the device, or take values of this step from the host."""


class _HostReads(Watch):
    """Finds the first call of torch that reads a value on the host, or takes one from there."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in _READS:
            self.meet(f"torch's {name} reads values on the host")
        elif name in ("__getitem__", "__setitem__") and any(
            isinstance(each, Tensor) and each.dtype is torch.bool for each in tree_leaves(args[1])
        ):
            self.meet("how many values a mask selects is read on the host")
        return func(*args, **(kwargs or {}))
