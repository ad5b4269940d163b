"""Messages between the ranks of two engines: a subscription one way, pieces with some blocks of a layer the other way.
A connection serves one fetch, and is closed after it. Every message is the header of a `Pipe`, and a piece has a
tensor.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

import msgspec
from torch import Tensor

from octavo.errors import PipeError
from octavo.kv_transfer.messages import PeerRank
from octavo.worker.transfer.block_io import BlockIO, Place

PIECE_BYTES: Final = 1 << 20
"""Most bytes of a piece, unless one block of a layer has more. A piece of this size stays in a processor's cache until
it is sent."""

Range = tuple[int, int]
"""First and end."""


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """A request for these layers of a transfer. heads: for each cache group, empty where none are wanted. blocks: their
    numbers in the transfer, for each cache group."""

    transfer: bytes
    layers: Range
    heads: list[Range]
    blocks: list[list[int]]


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """The content of these blocks of a transfer, in one layer and cache group.

    epoch: the epoch of the engine that has computed them. checksum: CRC-32 of the content, continued from the CRC-32 of
    this message encoded without checksum.
    """

    transfer: bytes
    layer: int
    group: int
    heads: Range
    blocks: list[int]
    epoch: bytes
    checksum: int = 0

    def checksum_of(self, content: Tensor) -> int:
        """Return the checksum of this piece with this content."""
        head = msgspec.msgpack.encode(msgspec.structs.replace(self, checksum=0))
        return zlib.crc32(content.view(-1).numpy().data, zlib.crc32(head))

    def signed(self, content: Tensor) -> Piece:
        """Return the piece with the checksum of this content."""
        return msgspec.structs.replace(self, checksum=self.checksum_of(content))


class BlocksGone(msgspec.Struct, frozen=True, tag="gone"):
    """Blocks of the subscription will not come."""

    reason: str


def bounds(numbers: range) -> Range:
    """Return a range in the form of a message."""
    return numbers.start, numbers.stop


Message = Subscribe | Piece | BlocksGone
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(header: bytes) -> Message:
    """Return the message in a header. Raises PipeError."""
    try:
        return _decoder.decode(header)
    except msgspec.MsgspecError as error:
        raise PipeError(f"what came is no message of a KV transfer: {error}") from error


def blocks_per_piece(blocks: BlockIO, place: Place, heads: range) -> int:
    """Return the most blocks of a piece with these heads."""
    planes, _, num_heads, num_bytes = blocks.shape(place, 1, heads)
    return max(1, PIECE_BYTES // (planes * num_heads * num_bytes))


class PeerPart(NamedTuple):
    """The part of this rank's need that one rank of another engine has. heads: in each cache group, empty for none."""

    peer: PeerRank
    layers: range
    heads: list[range]


def divide(peers: list[PeerRank], own: BlockIO) -> list[PeerPart]:
    """Divide the layers and heads of this rank over the ranks of another engine. Of ranks with the same part, one is
    used. Raises PipeError if parts are missing.
    """
    parts = [
        PeerPart(peer, overlap(own.layers, peer.layers), []) for peer in peers if len(peer.heads) == own.num_groups
    ]
    for number, heads in enumerate(own.heads):
        layers = [place.layer for place in own.places if place.group == number]
        found, num_found = set(), 0
        for part in parts:
            common = overlap(heads, part.peer.heads[number])
            num_layers = sum(layer in part.layers for layer in layers)
            is_used = num_layers and len(common) and (part.layers, common) not in found
            part.heads.append(common if is_used else range(0))
            if is_used:
                found.add((part.layers, common))
                num_found += num_layers * len(common)
        if num_found != len(layers) * len(heads):
            needed = f"layers {own.layers.start} to {own.layers.stop - 1}, heads {heads.start} to {heads.stop - 1}"
            raise PipeError(f"the ranks of the other engine do not have {needed} once")
    return [part for part in parts if any(part.heads)]


def overlap(one: range, other: Range) -> range:
    """Return the intersection of two ranges."""
    return range(max(one.start, other[0]), min(one.stop, other[1]))
