"""Prefixes that stay in the cache of every group until a time, named by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.cache_key import CacheKey
from octavo.core.outputs import PinnedPrefix
from octavo.kv_cache.block_hash import extend_chain
from octavo.kv_cache.group_cache import GroupCache


class PinnedPrefixes:
    """The pins of all cache groups. They take at most half of each pool together."""

    def __init__(self, groups: Sequence[GroupCache], block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size

    @property
    def num_blocks(self) -> int:
        """Device blocks that pins hold, whoever else uses them."""
        return sum(len(cache.pins.blocks) for cache in self._groups)

    def pin(self, token_ids: list[int], cache_key: CacheKey, until: float) -> PinnedPrefix:
        """Keep the full blocks of this prefix until then: those that are cached, and the others once they are."""
        digests, size = extend_chain([], token_ids, self._block_size, cache_key), self._block_size
        self._unpin(digests)
        tightest = min(self._groups, key=lambda cache: cache.pins.room_for(digests))
        kept = digests[: tightest.pins.room_for(digests)]
        for cache in self._groups:
            cache.pins.pin(digests, len(kept), until)
        num_cached = min(cache.pins.num_held(kept) for cache in self._groups)
        because = f"only full blocks are kept, of {size} tokens each" if len(kept) * size < len(token_ids) else ""
        if len(kept) < len(digests):
            num_blocks = tightest.pool.num_blocks
            because = f"pins may take half of the {num_blocks} KV blocks, and this one has no more of them"
        return PinnedPrefix(num_tokens=len(kept) * size, num_cached_tokens=num_cached * size, because=because)

    def unpin(self, token_ids: list[int], cache_key: CacheKey) -> bool:
        """End the pin of exactly this prefix; False when there is none."""
        return self._unpin(extend_chain([], token_ids, self._block_size, cache_key))

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        for cache in self._groups:
            if cache.pins:
                cache.pins.expire(now)

    def clear(self) -> int:
        """End all pins. Returns how many blocks they held."""
        num_held = self.num_blocks
        for cache in self._groups:
            cache.pins.clear()
        return num_held

    def _unpin(self, digests: list[bytes]) -> bool:
        were_pinned = [cache.pins.unpin(digests) for cache in self._groups]
        return any(were_pinned)
