"""Small steps from a list of kernel calls: a model that need not be run by Python again for what it did before.

A step runs the same kernels on the same addresses as the last one with as many tokens and rows; only what lies there
differs. So the calls of one such step are kept, and made again for the next ones. Decode steps repeat by themselves,
and the scheduler gives steps that compute prompts beside them few different sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.device import LanguageModel
from octavo.devices.dry_run import storage_of, tensors_in
from octavo.devices.watch import Watch, watched

if TYPE_CHECKING:
    from octavo import _native

_log = logging.getLogger(__name__)

MAX_TOKENS: Final = 64
"""Larger steps are run by Python: their kernels take so long that calling them does not show."""

MAX_RECORDINGS: Final = 64
"""Most recordings that are kept; the least recently used one is dropped first."""

_Key = tuple[int, ...]
_num_guesses: Final = attrgetter("num_guesses")


@dataclass(frozen=True, slots=True)
class _Recording:
    calls: _native.Recording
    hidden: Tensor
    """[tokens, hidden], where the calls write them."""
    kept: object
    """The other objects that the calls read: they must live as long as the calls."""


class RecordedModel:
    """A model whose small steps are recorded when a number of tokens and rows comes for the second time.

    The batches of such steps must lie at the same addresses each time. Hidden states are valid until the next step. A
    model that computes with anything but compiled kernels is never recorded; a line in the log says what it is.
    """

    def __init__(self, model: LanguageModel, runtime: CpuRuntime, max_tokens: int = MAX_TOKENS) -> None:
        """max_tokens: most tokens of a step; none with more than `MAX_TOKENS` is recorded."""
        self._model = model
        self._runtime = runtime
        self._max_tokens = min(max_tokens, MAX_TOKENS)
        self._recordings: dict[_Key, _Recording | None] = {}
        """The least recently used one first; None for what was seen once."""
        self._is_recordable = True
        self.compute_logits = model.compute_logits

    def __call__(self, batch: ModelInput) -> Tensor:
        """Return the last hidden states [tokens, hidden]."""
        is_plain = batch.is_plain and not any(map(_num_guesses, batch.attention))
        if not self._is_recordable or not is_plain or len(batch.token_ids) > self._max_tokens:
            return self._model(batch)
        key = _addresses(batch)
        was_seen = key in self._recordings
        recording = self._recordings.pop(key, None)
        if recording is not None:
            self._recordings[key] = recording
            recording.calls.run()
            return recording.hidden
        if not was_seen:
            hidden = self._model(batch)
        else:
            hidden, recording = self._record(batch)
        self._recordings[key] = recording
        if len(self._recordings) > MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        return hidden

    def _record(self, batch: ModelInput) -> tuple[Tensor, _Recording | None]:
        """Return the hidden states of `batch`, and the recording for the next ones like it unless there can be none."""
        watch = _Watch()
        with watch:
            room = self._max_tokens, len(batch.token_ids)
            hidden, calls = self._runtime.record(lambda: self._model(watched(batch, watch.meet)), room)
        if watch.obstacle is None:
            return hidden, _Recording(calls, hidden, (batch, watch.made))
        self._is_recordable = False
        self._recordings.clear()
        _log.info("steps are not recorded: %s is no compiled kernel", watch.obstacle)
        return hidden, None


def _addresses(batch: ModelInput) -> _Key:
    """Return the addresses and sizes by which kernels tell batches apart; the contents of tensors play no part."""
    first = batch.attention[0]
    return (
        len(batch.token_ids),
        len(first.lengths),
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        first.query_starts.data_ptr(),
        first.sequence_lengths.data_ptr(),
        *(
            number
            for each in batch.attention
            for number in (each.slot_mapping.data_ptr(), each.block_tables.data_ptr(), each.block_tables.stride(0))
        ),
    )


_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_DESCRIPTIONS = frozenset(
    {
        *("__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "nelement"),
        *("numel", "size", "storage_offset", "stride", "untyped_storage"),
    }
)
"""Functions that describe how a tensor lies in memory, not its contents. `__get__` reads attributes (`shape`)."""


class _Watch(Watch):
    """Finds the first call of torch that does more than cut a tensor differently or make an empty one.

    On the level of torch's Python functions: the one below has to import seconds of torch before its first call. A mesh
    makes its calls visible here where they are not compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name in _EMPTY:
            self.made.append(result)
        elif not (name in _DESCRIPTIONS or _is_view(name, result, args, kwargs or {})):
            self.meet(func.__qualname__ if isinstance(func, MethodType) else f"torch's {name}")
        return result


def _is_view(name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place or name.startswith("__i") or "out" in kwargs or "inplace" in kwargs:
        return False
    inputs = {storage_of(each) for each in tensors_in((args, kwargs))}
    outputs = tensors_in(result)
    # without outputs it has read a value
    return bool(outputs) and all(storage_of(each) in inputs for each in outputs)
