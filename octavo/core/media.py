"""Images and sounds of prompts after preprocessing: what an encoder reads, and which tokens stand for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from octavo.core.arithmetic import num_blocks_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

ITEM_BYTES: Final = {"float32": 4, "int64": 8, "int32": 4, "uint8": 1}
"""Bytes of an element by the name of its type."""


class TypedArray(msgspec.Struct, frozen=True):
    """An array as it travels: its elements in the order of their last index, little-endian."""

    dtype: Literal["float32", "int64", "int32", "uint8"]
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        assert len(self.data) == prod(self.shape) * ITEM_BYTES[self.dtype], "an array has more or fewer bytes"


class MediaInput(msgspec.Struct, frozen=True):
    """One image, sound or video of a prompt; or vectors given in place of all its tokens (`embeds`); or all its tokens
    where they attend to each other (`prompt`), which no encoder reads."""

    kind: Literal["image", "audio", "video", "embeds", "prompt"]
    digest: bytes
    """SHA-256 of the decoded content and the settings of its preprocessing."""
    spans: tuple[tuple[int, int], ...]
    """(offset, length) of the prompt's tokens that stand for it, mostly one; none where the decoder reads it through
    caches of its own (`views_of`)."""
    num_embeddings: int
    """Vectors that its encoder makes of it."""
    arrays: dict[str, TypedArray]
    """Inputs of the encoder, by name."""
    is_whole: bool = False
    """The tokens of a span attend to each other, so a step computes all that are left of it."""
    grid: tuple[int, int] | None = None
    """Rows and columns of each of its spans, if positions depend on them (M-RoPE)."""
    times: tuple[int, ...] = ()
    """Positions in time of the parts of its one span, from the first; none where a span has one time."""
    offset: int = 0
    """The first token that sees it, of an input without spans."""
    is_apart: bool = False
    """Its rows and columns count from 0, and positions after it continue from its last token. The first and the last
    token of its span stand around the grid."""
    num_before: int = 0
    """Tokens before its first span that are computed as its own, so that their keys and values depend on it."""

    @property
    def end(self) -> int:
        """The position after its last token; 0 without spans."""
        return max((offset + length for offset, length in self.spans), default=0)


class View(NamedTuple):
    """Tokens from `offset` on see vectors [first, end) of those that a request has in caches of encoders' outputs."""

    offset: int
    first: int
    end: int


def views_of(media: Iterable[MediaInput], block_size: int) -> tuple[View, ...]:
    """Return what each input without spans adds to what is seen, in their order.

    Inputs of neighbouring tokens are seen together. Others hide those before them, and begin a block.
    """
    views: list[View] = []
    first = end = 0
    for each in media:
        if each.spans:
            continue
        if views and each.offset != views[-1].offset + 1:
            first = end = num_blocks_for(end, block_size) * block_size
        end += each.num_embeddings
        views.append(View(each.offset, first, end))
    return tuple(views)


def num_positions_of(num_tokens: int, media: Iterable[MediaInput]) -> int:
    """Return how many positions a prompt of so many tokens has, at least one for each: where a model turns by rows,
    columns and times, what follows a video goes on behind the largest of its times."""
    num_saved = 0
    for each in media:
        if each.grid is not None and not each.is_apart:
            longest = max([*each.grid, *[time + 1 for time in each.times]])
            num_saved += sum(length - longest for _, length in each.spans)
    return num_tokens - min(0, num_saved)


def typed_array(array: NDArray[Any]) -> TypedArray:
    """Return an array as it travels: floats in float32, integers in int64, flags and bytes in uint8."""
    kinds: dict[str, Any] = {"f": "float32", "i": "int64", "u": "uint8", "b": "uint8"}
    dtype = kinds[array.dtype.kind]
    return TypedArray(dtype, tuple(array.shape), array.astype(dtype, copy=False).tobytes())


def digest_of(arrays: Mapping[str, TypedArray]) -> bytes:
    """Return SHA-256 of all that an encoder reads."""
    hashed = sha256(b"octavo media\0")
    for name, array in sorted(arrays.items()):
        hashed.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        hashed.update(array.data)
    return hashed.digest()
