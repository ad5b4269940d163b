"""What decides about keys and values besides the tokens: requests share KV blocks only where it is the same."""

from __future__ import annotations

import msgspec


class Placeholder(msgspec.Struct, frozen=True):
    """Prompt tokens [offset, offset + length) that stand for other content, such as an image.

    `digest` names the content: 256 bits of a cryptographic hash of all that the model makes its embeddings from.
    """

    offset: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        assert self.offset >= 0, f"a placeholder begins at {self.offset}"
        assert self.length > 0, f"a placeholder has {self.length} tokens"


class CacheKey(msgspec.Struct, frozen=True):
    """Salt and adapter concern the whole prompt; a placeholder only what comes after its first token."""

    cache_salt: str | None = None
    adapter: str | None = None
    placeholders: tuple[Placeholder, ...] = ()


PLAIN = CacheKey()
"""Of a prompt that is text alone."""
