"""What is called when the prefix index of the device pools changes: KV events, transfers to other engines, saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.kv_cache.block_pool import Content


class BlockListener(Protocol):
    """Called in the order of the changes, on the thread that plans steps. A method returns at once and changes no pool.

    Content with fewer token keys than a block has tokens is that of a tail (`BlockManager.publish_tail`).
    """

    def stored(self, group: int, block: int, content: Content) -> None:
        """Note that a block of a cache group has this content, once the step that is being planned has run."""

    def removed(self, group: int, digest: bytes) -> None:
        """Note that content has left the index of a cache group: it was evicted, invalidated, or reset."""
