"""Where llama.cpp's converter has put rows or columns of a tensor into another order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Final

from octavo.gguf.metadata import Metadata

ORDERED: Final = frozenset(
    ("attn_qkv", "attn_gate", "ssm_ba", "ssm_alpha", "ssm_beta", "ssm_out", "ssm_conv1d", "ssm_dt", "ssm_a")
)
"""Tensors that some architecture has in another order."""
_MOST_HEADS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Order:
    """Where the rows and columns of a tensor are in a file, in the order that they have in a checkpoint.

    Empty for those that are in their place.
    """

    rows: tuple[slice, ...] = ()
    columns: tuple[slice, ...] = ()
    beside: tuple[tuple[str, tuple[slice, ...]], ...] = ()
    """Other tensors of a layer whose rows this tensor holds, too: their names in a layer, and these rows."""


def falcon(meta: Metadata, own: str) -> Order:
    """Return the order of queries, keys and values, which a checkpoint has beside each other for each head of keys."""
    return _beside(meta, *_heads(meta, "attention.head_count", "attention.head_count_kv", 1), own)


def per_head(meta: Metadata, own: str) -> Order:
    """Return the order of queries, keys and values as `falcon` does, where each head has keys of its own."""
    return _beside(meta, *_heads(meta, "attention.head_count", "attention.head_count"), own)


def chatglm(meta: Metadata, own: str) -> Order:
    """Return the rows of queries, and `beside` those of keys and values, which are tensors of their own here."""
    if own != "attn_qkv":
        return Order()
    heads, kv = _heads(meta, "attention.head_count", "attention.head_count_kv")
    dim = meta.positive("embedding_length") // heads
    keys, values = (_run(heads + turn * kv, kv * dim, dim) for turn in (0, 1))
    return Order((slice(0, heads * dim),), beside=(("attn_k", (keys,)), ("attn_v", (values,))))


def _beside(meta: Metadata, heads: int, kv: int, own: str) -> Order:
    if own != "attn_qkv":
        return Order()
    dim, share = meta.positive("embedding_length") // heads, heads // kv
    groups = [
        (_run(head * share, share * dim, dim), _run(heads + head, dim, dim), _run(heads + kv + head, dim, dim))
        for head in range(kv)
    ]
    return Order((*chain.from_iterable(groups),))


def qwen3next(meta: Metadata, own: str) -> Order:
    """Return the rows of beta, and `beside` those of step: one tensor has both, by heads of keys; here they are two."""
    if own != "ssm_ba":
        return Order()
    heads, keys = _heads(meta, "ssm.time_step_rank", "ssm.group_count")
    share = heads // keys
    beta, step = ((*(_run(2 * key + at, share, share) for key in range(keys)),) for at in (0, 1))
    return Order(beta, beside=(("ssm_alpha", step),))


def qwen35(meta: Metadata, own: str) -> Order:
    """Return the order of heads of values: in a file the first of all heads of keys come first."""
    heads, keys = _heads(meta, "ssm.time_step_rank", "ssm.group_count")
    dim, before = meta.positive("ssm.inner_size") // heads, 2 * keys * meta.positive("ssm.state_size")
    if heads == keys:
        return Order()
    share = heads // keys
    places = [turn * keys + key for key in range(keys) for turn in range(share)]
    wide, narrow = ((*(_run(place, width, width) for place in places),) for width in (dim, 1))
    if own in ("attn_qkv", "ssm_conv1d"):
        behind = tuple(slice(before + each.start, before + each.stop) for each in wide)
        return Order((slice(0, before), *behind))
    if own == "attn_gate":
        return Order(wide)
    if own == "ssm_out":
        return Order(columns=wide)
    return Order(narrow) if own in ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a") else Order()


def _heads(meta: Metadata, name: str, of_keys: str, *default: int) -> tuple[int, int]:
    """Return the number of heads, and of heads of keys. Raises CheckpointError."""
    heads, keys = meta.positive(name), meta.positive(of_keys, *default)
    if heads > _MOST_HEADS or heads % keys:
        raise meta.error(name, f"at most {_MOST_HEADS:,}, and a multiple of {of_keys}, which is {keys:,}")
    return heads, keys


def _run(place: int, length: int, unit: int) -> slice:
    """Return `length` rows, the first of which is row `place · unit`."""
    return slice(place * unit, place * unit + length)
