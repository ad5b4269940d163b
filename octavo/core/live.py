"""What an engine core reports of itself for the live view: its requests, its last step, and what each KV block is."""

from __future__ import annotations

from typing import Final

import msgspec

from octavo.core.messages import Decision, RequestTimeline, SchedulerStats

FREE, CACHED, USED, SHARED, PINNED, HELD = range(6)
"""What a block is: empty; with content that no request uses; of one request, or of several; kept by a pin alone; kept
while it is copied or sent."""
OWNER_SHIFT: Final = 3
"""The low bits of a cell are one of these states, the bits above them the number of a request that uses the block, 0
for none.
"""

MOST_REQUESTS: Final = 200
MOST_ENTRIES: Final = 64
"""Requests, and decisions and ended requests, that one report has at most."""


class LiveRequest(msgspec.Struct, frozen=True):
    """A request that has not ended. state: a `SequenceStatus`. events: its timeline, on the clock of the core.

    Counts of tokens and blocks are over all its sequences, `computed` is of the first one.
    """

    request_id: str
    state: str
    tenant: str | None
    prompt: int
    cached: int
    computed: int
    generated: int
    sequences: int
    blocks: int
    preemptions: int
    events: list[tuple[float, str]]


class LiveRow(msgspec.Struct, frozen=True):
    """A row of a step: the number of its request, its first position, and how many tokens it computes and draws."""

    request: int
    start: int
    tokens: int
    samples: int


class BlockMap(msgspec.Struct, frozen=True):
    """The blocks of one tier ("device" or "host") of a cache group. cells: 32 bits for each block, from block 1 on, in
    the machine's order of bytes. A host tier that nothing uses has no map."""

    tier: str
    group: int
    cells: bytes


class LiveState(msgspec.Struct, frozen=True):
    """The state of one core. time: on its clock. step_s: how long the last step took.

    cost_s: processor time that the report took. requests: by number. decisions and ended: those of the time that was
    asked for.
    """

    time: float
    cost_s: float
    step_s: float
    stats: SchedulerStats
    requests: dict[int, LiveRequest]
    rows: list[LiveRow]
    maps: list[BlockMap]
    decisions: list[Decision]
    ended: list[RequestTimeline]
    replica: int = 0
