"""The numbers of a decoder that memory arithmetic and the KV cache need."""

from __future__ import annotations

import msgspec


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
    sliding_window: int | None = None
    """Tokens that a query sees in every layer, itself included. None where a layer sees all: then all are kept."""
