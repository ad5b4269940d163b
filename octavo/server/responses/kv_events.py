"""The events of `GET /kv/events`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class KvEvent(Struct, frozen=True, omit_defaults=True):
    """Data of an event of `GET /kv/events`. `stored` and `removed` name blocks of one cache group by their digests;
    `cleared` begins what is sent of a replica: nothing that was sent of it before holds.

    sequence: the number of the event in its replica; of several blocks it is that of the last. time: Unix seconds.
    parent: the digest of the block before the first one, or the root of its chain; the blocks follow one another.
    num_tokens: of all the blocks; the last block of a prompt may be partly filled.
    """

    kind: Literal["stored", "removed", "cleared"]
    sequence: int
    time: float
    replica: int
    cache_group: int | None = None
    digests: list[str] = []
    parent: str | None = None
    block_size: int | None = None
    num_tokens: int = 0
