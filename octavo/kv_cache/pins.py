"""Pins prefixes in the cache until a time: their blocks are not evicted.

A pin names content, not blocks: it holds the blocks of its content that are cached now, and each other one as soon as a
request has computed it, in every cache group. Pins with a common prefix share its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from octavo.core.cache_key import CacheKey
from octavo.core.outputs import PinnedPrefix
from octavo.kv_cache.block_hash import extend_chain
from octavo.kv_cache.group_cache import GroupCache, fewest_blocks
from octavo.kv_cache.retention import longest_common

_KEPT: Final = b"kept "


class _Pin(NamedTuple):
    until: float
    digests: Sequence[bytes]


class Pins:
    """The pins of all cache groups.

    At most half of the blocks of each pool, cached or to come, are pinned at once. Recurrent states of a prefix are
    held where they are cached, up to half of their blocks.
    """

    def __init__(self, groups: Sequence[GroupCache]) -> None:
        self._groups = groups
        self._pools = pools = [cache.pool for cache in groups]
        self._block_size = groups[0].block_size
        self._most_held = [pool.num_blocks // 2 for pool in pools]
        self._max_blocks = fewest_blocks(groups) // 2
        self._pins: dict[bytes, _Pin] = {}
        """By kind and last digest."""
        self._num_pins: dict[bytes, int] = {}
        self._blocks: list[dict[bytes, int]] = [{} for _ in pools]

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Device blocks that pins hold; requests may use them as well."""
        return sum(map(len, self._blocks))

    def blocks_of(self, group: int) -> list[int]:
        """Return the blocks of one cache group that pins hold; none of a group with an encoder's output."""
        return list(self._blocks[group].values()) if group < len(self._blocks) else []

    def pin(self, token_ids: list[int], cache_key: CacheKey, until: float) -> PinnedPrefix:
        """Keep the full blocks of this prefix until the time `until`: the cached ones now, the others once they are
        cached."""
        size = self._block_size
        digests = extend_chain([], token_ids, size, cache_key)
        num_kept = self.pin_digests(digests, until)
        num_cached = self.num_held(digests[:num_kept])
        because = f"only full blocks are kept, of {size} tokens each" if num_kept * size < len(token_ids) else ""
        if num_kept < len(digests):
            num_blocks = fewest_blocks(self._groups)
            because = f"pins may take half of the {num_blocks} KV blocks, and this one has no more of them"
        return PinnedPrefix(num_tokens=num_kept * size, num_cached_tokens=num_cached * size, because=because)

    def unpin(self, token_ids: list[int], cache_key: CacheKey) -> bool:
        """End the pin of exactly this prefix. Returns whether there was one."""
        return self.unpin_digests(extend_chain([], token_ids, self._block_size, cache_key))

    def pin_digests(self, digests: Sequence[bytes], until: float, kind: bytes = b"") -> int:
        """Pin a prefix by the digest chain of its full blocks, or change its time. Returns how many leading blocks fit.
        kind: pins of the same prefix for different purposes are different pins."""
        self.unpin_digests(digests, kind)
        room = self._max_blocks - len(self._num_pins)
        num_known = next((i for i, digest in enumerate(digests) if digest not in self._num_pins), len(digests))
        kept = digests[: num_known + room]
        if kept:
            self._pins[kind + digests[-1]] = _Pin(until, kept)
        for digest in kept:
            self._num_pins[digest] = self._num_pins.get(digest, 0) + 1
            self.hold(digest)
        return len(kept)

    def keep(self, digests: Sequence[bytes], until: float) -> None:
        """Pin a prefix for another engine until the time `until`; an earlier such pin that ends later keeps its end."""
        if not digests:
            return
        pin = self._pins.get(_KEPT + digests[-1])
        self.pin_digests(digests, until if pin is None else max(until, pin.until), _KEPT)

    def end_keep(self, digests: Sequence[bytes]) -> None:
        """End the pin of a prefix that the other engine has received."""
        self.unpin_digests(digests, _KEPT)

    def unpin_digests(self, digests: Sequence[bytes], kind: bytes = b"") -> bool:
        """End the pin of exactly this chain. Returns whether there was one."""
        return bool(digests) and self._end(kind + digests[-1])

    def _end(self, name: bytes) -> bool:
        """End the pin with this name: its kind and its last digest. Returns whether there was one."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        for digest in reversed(pin.digests):
            self._num_pins[digest] -= 1
            if self._num_pins[digest] == 0:
                del self._num_pins[digest]
                self.let_go(digest)
        return True

    def num_held(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prefix are held such that a sequence may continue them."""
        retentions, finds = [cache.retention for cache in self._groups], [blocks.get for blocks in self._blocks]
        return len(longest_common(retentions, finds, digests)[0][0])

    def lengths(self, digests: Sequence[bytes]) -> list[int]:
        """Return the numbers of leading blocks of a sequence after which a pinned prefix ends."""
        if not self._pins:
            return []
        ends = {pin.digests[-1] for pin in self._pins.values()}
        return [i for i, digest in enumerate(digests, 1) if digest in ends]

    def hold(self, digest: bytes) -> None:
        """Hold the cached blocks with this content if it is pinned. Called for every published block."""
        if digest not in self._num_pins:
            return
        for pool, blocks, most in zip(self._pools, self._blocks, self._most_held, strict=True):
            block = pool.find(digest)
            if block is not None and digest not in blocks and len(blocks) < most:
                pool.acquire(block)
                blocks[digest] = block

    def let_go(self, digest: bytes) -> None:
        """Release the held blocks with this content; blocks published later are held again."""
        for pool, blocks in zip(self._pools, self._blocks, strict=True):
            if digest in blocks:
                pool.release(blocks.pop(digest))

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            self._end(name)

    def clear(self) -> int:
        """End all pins. Returns how many blocks they held."""
        num_held = self.num_blocks
        self.expire(math.inf)
        return num_held
