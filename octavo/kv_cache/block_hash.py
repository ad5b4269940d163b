"""Names of KV blocks by content: a chain of SHA-256 digests, one per full block.

A digest covers every token up to the end of its block, and what else keeps prefixes apart: namespace, salt, adapter,
and the content that placeholders up to there stand for. It is 256 bits of a cryptographic hash, so that equal digests
are taken as equal prefixes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceABC
from hashlib import sha256

from octavo.core.cache_key import CacheKey, Placeholder

TokenKey = int | tuple[int, int, bytes]
"""The key of one position: the token id; in a placeholder also the place in its content and the digest."""


def root_digest(cache_key: CacheKey) -> bytes:
    """Return the start of a chain. Requests with different namespaces, salts or adapters share nothing."""
    # `ascii` distinguishes every three texts from every other three, whatever characters they hold
    named = ascii((cache_key.cache_namespace, cache_key.cache_salt or "", cache_key.adapter))
    return sha256(b"octavo block chain\0" + named.encode()).digest()


def encoding_names(cache_key: CacheKey, num_blocks: int) -> tuple[bytes, ...]:
    """Return the names of the blocks that hold the encoder's output for what all placeholders of a prompt stand for.

    Outputs of neighbours stand side by side, each other one begins a block (`core.media.views_of`).
    """
    named, behind = root_digest(cache_key), -1
    for each in cache_key.placeholders:
        named = sha256(named + each.digest + bytes([each.offset == behind])).digest()
        behind = each.offset + each.length
    return tuple(named[:28] + number.to_bytes(4, "big") for number in range(num_blocks))


def next_digest(parent: bytes, token_ids: list[int], content: bytes = b"") -> bytes:
    """Return the digest of a block with these tokens and placeholders, behind the prefix `parent`."""
    return sha256(parent + array("q", token_ids).tobytes() + content).digest()


def extend_chain(digests: list[bytes], token_ids: list[int], block_size: int, cache_key: CacheKey) -> list[bytes]:
    """Return the digests of all full blocks of these tokens. `digests` has the first of them; the others are added."""
    for end in range((len(digests) + 1) * block_size, len(token_ids) + 1, block_size):
        parent = digests[-1] if digests else root_digest(cache_key)
        digests.append(_digest_behind(parent, token_ids, end - block_size, end, cache_key.placeholders))
    return digests


def tail_digest(digests: list[bytes], token_ids: list[int], end: int, block_size: int, cache_key: CacheKey) -> bytes:
    """Return the name of the last block of the first `end` tokens, whose full blocks have the names `digests`. The name
    of a partly filled block differs from that of every full block.
    """
    num_before = (end - 1) // block_size
    parent = digests[num_before - 1] if num_before else root_digest(cache_key)
    return _digest_behind(parent, token_ids, num_before * block_size, end, cache_key.placeholders)


def _digest_behind(
    parent: bytes, token_ids: list[int], start: int, end: int, placeholders: SequenceABC[Placeholder]
) -> bytes:
    content = _content(placeholders, start, end) if placeholders else b""
    return next_digest(parent, token_ids[start:end], content)


def token_keys(
    token_ids: list[int], start: int, end: int, placeholders: SequenceABC[Placeholder]
) -> list[int] | list[TokenKey]:
    """Return the keys of positions [start, end), which are compared to find how far two blocks behind one prefix are
    alike.
    """
    if not placeholders:
        return token_ids[start:end]
    keys: list[TokenKey] = [*token_ids[start:end]]
    for placeholder in placeholders:
        for position in _overlap(placeholder, start, start + len(keys)):
            keys[position - start] = (token_ids[position], position - placeholder.offset, placeholder.digest)
    return keys


def _content(placeholders: SequenceABC[Placeholder], start: int, end: int) -> bytes:
    """Return the content of placeholders in the block [start, end): for each its position, the part in the block, and
    its digest.
    """
    parts = []
    for placeholder in placeholders:
        overlap = _overlap(placeholder, start, end)
        if overlap:
            place = [overlap.start - start, len(overlap), overlap.start - placeholder.offset, len(placeholder.digest)]
            parts.append(array("q", place).tobytes() + placeholder.digest)
    return b"".join(parts)


def _overlap(placeholder: Placeholder, start: int, end: int) -> range:
    """Return the positions of [start, end) that belong to the placeholder."""
    return range(max(start, placeholder.offset), min(end, placeholder.offset + placeholder.length))
