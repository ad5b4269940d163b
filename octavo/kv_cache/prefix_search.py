"""Finds the cached prefix of a sequence in all cache groups, and the reason why it is not longer."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.cache_key import CacheKey
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.block_hash import encoding_names, root_digest, token_keys
from octavo.kv_cache.group_cache import GroupCache
from octavo.kv_cache.retention import longest_common


def find_hit(
    caches: Sequence[GroupCache],
    digests: list[bytes],
    token_ids: list[int],
    num_usable: int,
    key: CacheKey,
    num_encoded_blocks: int = 0,
) -> PrefixHit:
    """Return the hit among the first `num_usable` tokens. `digests` cover at least these. num_encoded_blocks: number of
    blocks of encoders' outputs. The beginning of the next block is copied if every group keeps tokens; a state belongs
    to one position and cannot be cut.
    """
    size = caches[0].block_size
    encoded = [cache for cache in caches if cache.holds_encoding]
    caches = caches[: len(caches) - len(encoded)]
    retentions, finds = [cache.retention for cache in caches], [cache.pool.find for cache in caches]
    dense = [cache for cache in caches if not cache.retention.is_state]
    blocks, alone = longest_common(retentions, finds, digests[: num_usable // size])
    num_blocks = len(blocks[0])
    start = num_blocks * size
    missing = digests[num_blocks] if num_blocks < num_usable // size else None
    num_parted = min([alone[cache.index] for cache in dense], default=0)
    sources, num_copied = list[int](), 0
    if len(dense) == len(caches):
        parent = digests[num_blocks - 1] if num_blocks else root_digest(key)
        rest = token_keys(token_ids, start, min(num_usable, start + size), key.placeholders)
        beginnings = [cache.pool.find_beginning(parent, rest) for cache in caches]
        num_copied = min([num_same for _, num_same in beginnings])
        sources = [block for block, _ in beginnings] if num_copied else []
    if missing is None:
        because = "the rest fills no block" if start + num_copied < num_usable else ""
    else:
        because = _because(caches, missing, start, alone)
    parted = num_parted if num_parted > num_blocks else 0
    for cache in encoded:
        blocks.append(cache.retention.find_prefix(encoding_names(key, num_encoded_blocks), cache.pool.find))
    return PrefixHit(blocks, start, missing, sources, num_copied, because, parted, num_encoded_blocks)


def _because(caches: Sequence[GroupCache], missing: bytes, start: int, alone: Sequence[int]) -> str:
    """Return why a prefix ends at token `start`: the groups that have less than others, or whether the block that all
    groups lack was evicted or is new."""
    most = max(alone)
    if most > start // caches[0].block_size:
        lacking = [cache.retention for cache in caches if alone[cache.index] < most]
        losses = " and ".join(f"{each.name} {each.loss}" for each in lacking)
        return f"{losses} between tokens {start:,} and {most * caches[0].block_size:,}"
    is_evicted = any(cache.pool.was_evicted(missing) for cache in caches)
    return "the next block was evicted" if is_evicted else "the next block is new"
