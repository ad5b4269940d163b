"""What is called when the prefix index of the device pools changes: KV events, transfers to other engines, saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.kv_cache.block_pool import BlockPool, Content


class BlockListener(Protocol):
    """Called in the order of the changes, on the thread that plans steps. A method returns at once and changes no pool.

    Content with fewer token keys than a block has tokens is that of a tail (`BlockManager.publish_tail`).
    """

    def stored(self, group: int, block: int, content: Content) -> None:
        """Note that a block of a cache group has this content, once the step that is being planned has run."""
        ...

    def removed(self, group: int, digest: bytes) -> None:
        """Note that content has left the index of a cache group: it was evicted, invalidated, or reset."""
        ...


class Listeners:
    """Any number of listeners of some pools. A pool calls one object: the only listener, or this, which calls all."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._each: list[BlockListener] = []

    def add(self, listener: BlockListener) -> None:
        """Call this listener as well, after the others."""
        self._set([*self._each, listener])

    def remove(self, listener: BlockListener) -> None:
        """Remove a listener."""
        self._set([each for each in self._each if each is not listener])

    def _set(self, listeners: list[BlockListener]) -> None:
        self._each = listeners
        for pool in self._pools:
            pool.listener = self if len(listeners) > 1 else next(iter(listeners), None)

    def stored(self, group: int, block: int, content: Content) -> None:
        for listener in self._each:
            listener.stored(group, block, content)

    def removed(self, group: int, digest: bytes) -> None:
        for listener in self._each:
            listener.removed(group, digest)
