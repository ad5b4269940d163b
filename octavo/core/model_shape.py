"""The numbers of a decoder that memory arithmetic and the KV cache need."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.arithmetic import num_blocks_for


class KeysAndValues(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps a key and a value of `head_dim` elements per token and head."""

    kv_heads: int
    head_dim: int

    def render(self) -> str:
        return f"keys and values of {self.kv_heads} x {self.head_dim} per token"


class Latent(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps one vector of `size` elements per token, which is a key; its first `value_size` are the value.

    It is the same on all ranks that share a layer.
    """

    size: int
    value_size: int

    def render(self) -> str:
        return f"a latent of {self.size} per token"


class Indexed(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps a key and a value per token and head as `KeysAndValues` does, and one key of `index_size` elements
    by which queries choose to which `num_seen` tokens they attend; 0 elements where they choose by another cache, 0
    tokens where they attend to all.
    """

    kv_heads: int
    head_dim: int
    index_size: int
    num_seen: int

    @property
    def num_values(self) -> int:
        """Elements per token."""
        return 2 * self.kv_heads * self.head_dim + self.index_size

    def render(self) -> str:
        small = f" and a key of {self.index_size}" if self.index_size else ""
        return f"keys and values of {self.kv_heads} x {self.head_dim}{small} per token"


class IndexedLatent(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps a latent per token as `Latent` does, and a key of `index_size` elements by which queries choose to
    which `num_seen` tokens they attend; 0 elements where an earlier layer chooses. A latent of 0 elements is none: the
    layer reads those of an earlier one.

    It is the same on all ranks that share a layer.
    """

    size: int
    value_size: int
    index_size: int
    num_seen: int

    @property
    def num_values(self) -> int:
        """Elements per token."""
        return self.size + self.index_size

    def render(self) -> str:
        sizes = {"a latent of": self.size, "a key of": self.index_size}
        return " and ".join(f"{what} {size}" for what, size in sizes.items() if size) + " per token"


class Spaced(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps one vector of `size` elements for every `stride` tokens: at the last of them.

    It is the same on all ranks that share a layer.
    """

    size: int
    stride: int = 1

    @property
    def num_values(self) -> int:
        """Elements of a vector."""
        return self.size

    def per_block(self, block_size: int) -> int:
        """Return the room for vectors in a block of so many tokens."""
        return num_blocks_for(block_size, self.stride)

    def render(self) -> str:
        return f"a vector of {self.size:,} " + ("per token" if self.stride == 1 else f"for every {self.stride} tokens")


class State(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps `num_values` float32 per block: its state after the last computed token of the block."""

    num_values: int

    def render(self) -> str:
        return f"a state of {self.num_values:,} float32 per block"


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """A layer keeps keys and values of the vectors of an encoder's outputs, which tokens behind its inputs read.

    num_tokens: vectors of one input. num_inputs: most of a request.
    """

    kv_heads: int
    head_dim: int
    num_tokens: int
    num_inputs: int = 1

    def most_vectors(self, block_size: int) -> int:
        """Return the room for the vectors of a request, in blocks of this size: each of several inputs may begin a
        block."""
        if self.num_inputs == 1:
            return self.num_tokens
        return self.num_inputs * num_blocks_for(self.num_tokens, block_size) * block_size

    def render(self) -> str:
        count = f"{self.num_inputs} x {self.num_tokens:,}" if self.num_inputs > 1 else f"{self.num_tokens:,}"
        return f"keys and values of {self.kv_heads} x {self.head_dim} for {count} vectors of the encoder"


Kept = KeysAndValues | Latent | Indexed | IndexedLatent | Spaced | State | Encoded
"""What a layer keeps of a sequence; `render` says it in words."""


class LayerCache(msgspec.Struct, frozen=True):
    """One cache of a layer. window: tokens that a query sees in it, itself included; None for all."""

    keeps: Kept
    window: int | None = None


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that keep the same data of a sequence: they share block tables, and have pools and caches of their own.

    layers: their indices, in ascending order; a layer may be in several groups. window: tokens that a query sees in
    them, itself included; None for all.
    """

    layers: tuple[int, ...]
    keeps: Kept
    window: int | None = None

    def of_range(self, layers: range) -> CacheGroup:
        """Return the part of this group in a range of layers, which are counted from the first of the range."""
        part = tuple(layer - layers.start for layer in self.layers if layer in layers)
        return msgspec.structs.replace(self, layers=part)


def group_layers(caches: Sequence[Sequence[LayerCache]]) -> tuple[CacheGroup, ...]:
    """Return the cache groups of layers with these caches, in the order of their first layers; those that keep an
    encoder's output come last."""
    kinds = dict.fromkeys(kind for each in caches for kind in each)
    return tuple(
        CacheGroup(tuple(layer for layer, each in enumerate(caches) if kind in each), kind.keeps, kind.window)
        for kind in sorted(kinds, key=lambda kind: isinstance(kind.keeps, Encoded))
    )


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer: of the whole model, or of one rank's part."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    cache_groups: tuple[CacheGroup, ...]
    """The layers by what they keep of a sequence; every layer is in one group at least."""

    @property
    def head_dims(self) -> frozenset[int]:
        """The sizes of heads that attention reads from the caches; latents are one head."""
        kept = {group.keeps for group in self.cache_groups}
        dims = {each.head_dim for each in kept if isinstance(each, KeysAndValues | Encoded)}
        return frozenset(dims | {each.size for each in kept if isinstance(each, Latent)})
