"""Cache groups of layers that differ by their window alone."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.model_shape import CacheGroup, KeysAndValues, LayerCache, group_layers

KEEPS = KeysAndValues(2, 8)


def group_windows(windows: Sequence[int | None], keeps: KeysAndValues = KEEPS) -> tuple[CacheGroup, ...]:
    """The groups of layers with these windows."""
    return group_layers([[LayerCache(keeps, window)] for window in windows])


def group(*layers: int, window: int | None = None, keeps: KeysAndValues = KEEPS) -> CacheGroup:
    """A group of these layers."""
    return CacheGroup(layers, keeps, window)
