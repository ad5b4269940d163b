"""The responses of the endpoints of the prefix cache."""

from __future__ import annotations

from msgspec import Struct


class CacheReset(Struct, frozen=True):
    """Response of `POST /reset_prefix_cache`: the cache is empty."""

    reset: bool = True


class PinPrefixResponse(Struct, frozen=True):
    """Response of `POST /pin_prefix`: leading tokens that are pinned, those of them that are cached already, and why it
    is not the whole prefix (empty when it is)."""

    pinned_tokens: int
    cached_tokens: int
    because: str


class UnpinPrefixResponse(Struct, frozen=True):
    """Response of `POST /unpin_prefix`: whether exactly this prefix was pinned."""

    unpinned: bool
