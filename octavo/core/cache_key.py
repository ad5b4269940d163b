"""The values besides tokens that decide about keys and values: requests share KV blocks only where they are equal."""

from __future__ import annotations

from hashlib import sha256

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
    """Namespace, salt and adapter hold for the whole prompt, a placeholder for what comes after its first token.

    cache_namespace: the digest of a secret of the sender (`namespace_digest`). The sender chooses the salt, but not the
    namespace that it is combined with.
    """

    cache_salt: str | None = None
    adapter: str | None = None
    placeholders: tuple[Placeholder, ...] = ()
    cache_namespace: str | None = None


PLAIN = CacheKey()
"""The key of a prompt that is text alone."""


def namespace_digest(secret: str) -> str:
    """Return 64 hexadecimal digits that stand for a namespace's secret in requests and do not reveal it."""
    return sha256(b"octavo cache namespace\0" + secret.encode("utf-8", "surrogatepass")).hexdigest()
