"""The numbers of a decoder that memory arithmetic and the KV cache need."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that keep the same tokens of a sequence: they share block tables, and have pools and caches of their own.

    layers: their indices, in ascending order. window: tokens that a query sees in them, itself included; None for all.

    Layers that keep something else, such as a recurrent state or a latent, are one more kind of group, with a field
    here that says what they keep (CONTRIBUTING.md, "How to add a kind of cache group").
    """

    layers: tuple[int, ...]
    window: int | None = None

    def of_range(self, layers: range) -> CacheGroup:
        """Return the part of this group in a range of layers, which are counted from the first of the range."""
        part = tuple(layer - layers.start for layer in self.layers if layer in layers)
        return msgspec.structs.replace(self, layers=part)


def group_layers(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """Return the cache groups of layers with these windows, in the order of their first layers."""
    return tuple(
        CacheGroup(tuple(layer for layer, each in enumerate(windows) if each == window), window)
        for window in dict.fromkeys(windows)
    )


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer, as the whole model has them (before any sharding)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    cache_groups: tuple[CacheGroup, ...]
    """The layers by what they keep of a sequence; every layer is in one group."""
