"""Answers with thousands of log-probabilities: built and encoded beside the event loop, a slice at a time.

A thread gives the interpreter lock back after a few milliseconds, but not inside one call: so long lists are encoded in
slices. One large answer is built at a time, so that the loop waits for one thread at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

SLICE: Final = 512
"""Entries of a list that are encoded in one call; answers about fewer tokens are built on the loop."""

T = TypeVar("T")


class LargeAnswers:
    """Runs what takes long one after the other, in a thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def build(self, build: Callable[[], T], num_entries: int) -> T:
        """What `build` returns, which has about so many entries."""
        if num_entries <= SLICE:
            return build()
        async with self._lock:
            return await asyncio.to_thread(build)


def encode(value: msgspec.Struct) -> bytes:
    """The JSON of an answer, with long lists encoded in slices."""
    return msgspec.json.encode(_in_slices(value))


def _in_slices(value: Any) -> Any:
    """`value` with its long lists encoded already; `value` itself where there are none."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changes = {name: new for name, old in fields.items() if (new := _in_slices(old)) is not old}
        return msgspec.structs.replace(value, **changes) if changes else value
    if not isinstance(value, list):
        return value
    items = [_in_slices(item) for item in value] if value and isinstance(value[0], msgspec.Struct) else value
    if len(items) <= SLICE:
        return items
    slices = (msgspec.json.encode(items[start : start + SLICE])[1:-1] for start in range(0, len(items), SLICE))
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")
