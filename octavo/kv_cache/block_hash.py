"""Names of KV blocks by content: a chain of SHA-256 digests, one per full block.

A digest covers every token up to the end of its block, and what else changes the keys and values (the salt). It is 256
bits of a cryptographic hash, so that equal digests are taken as equal prefixes.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from octavo.core.sequence import Sequence


def root_digest(cache_salt: str | None) -> bytes:
    """The start of a chain. Requests with different salts share nothing."""
    return sha256(b"octavo block chain\0" + (cache_salt or "").encode()).digest()


def next_digest(parent: bytes, token_ids: list[int]) -> bytes:
    """Digest of a full block with these tokens after the prefix that `parent` names."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_hashes(sequence: Sequence, block_size: int, cache_salt: str | None) -> list[bytes]:
    """Digests of all full blocks of the sequence's known tokens; kept on the sequence, so each is computed once."""
    hashes, token_ids = sequence.block_hashes, sequence.token_ids
    while (len(hashes) + 1) * block_size <= len(token_ids):
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_digest(cache_salt)
        hashes.append(next_digest(parent, token_ids[start : start + block_size]))
    return hashes
