"""The report of a core for the live view. It is made when a control call asks for it, and not otherwise."""

from __future__ import annotations

import time
from array import array
from itertools import islice
from typing import Final

from octavo.core.live import (
    HELD,
    MOST_ENTRIES,
    MOST_REQUESTS,
    OWNER_SHIFT,
    PINNED,
    USED,
    BlockMap,
    LiveRequest,
    LiveRow,
    LiveState,
)
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.core.step import SchedulerOutput
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

_KIND_BITS = (1 << OWNER_SHIFT) - 1
_MOST_NUMBERS: Final = (1 << 32 - OWNER_SHIFT) - 1
"""Cells have 32 bits, and an engine may see more requests than fit above those of the kind."""


def live_state(scheduler: Scheduler, last_step: SchedulerOutput | None, now: float, within_s: float) -> LiveState:
    """Return the state at time `now`, with the decisions and the ended requests of the last `within_s` seconds."""
    began = time.thread_time()
    manager = scheduler.block_manager
    groups = _listed(scheduler)
    rows = []
    for row in last_step.rows[:MOST_REQUESTS] if last_step is not None else ():
        owner, _ = scheduler.find(row.seq_id)
        rows.append(LiveRow(0 if owner is None else _number(owner), row.start, row.num_tokens, row.num_samples))
    ended = scheduler.timelines[-MOST_ENTRIES:]
    return LiveState(
        time=now,
        step_s=scheduler.rates.last_step_s,
        stats=scheduler.stats(),
        requests={_number(group): _request(group, manager) for group in groups},
        rows=rows,
        maps=_maps(scheduler),
        decisions=scheduler.log.recent(now - within_s, MOST_ENTRIES),
        ended=[timeline for timeline in ended if timeline.events[-1][0] >= now - within_s],
        cost_s=time.thread_time() - began,
    )


def _listed(scheduler: Scheduler) -> list[SequenceGroup]:
    """Return the groups that are reported: of too many those with blocks, and then those that have waited longest."""
    if len(scheduler.groups) <= MOST_REQUESTS:
        return list(scheduler.groups.values())
    groups = scheduler.groups_with_blocks()[:MOST_REQUESTS]
    waiting = (group for group in scheduler.groups.values() if group.status is SequenceStatus.WAITING)
    return groups + list(islice(waiting, MOST_REQUESTS - len(groups)))


def _number(group: SequenceGroup) -> int:
    return group.arrival % _MOST_NUMBERS + 1


def _request(group: SequenceGroup, manager: BlockManager) -> LiveRequest:
    tables = [manager.tables[each.seq_id].blocks for each in group.live if each.seq_id in manager.tables]
    return LiveRequest(
        request_id=group.request_id,
        state=group.status.value,
        tenant=group.request.tenant,
        prompt=group.num_prompt_tokens,
        cached=group.num_cached_tokens + group.num_fetched_tokens,
        computed=group.live[0].num_computed_tokens if group.live else 0,
        generated=sum(each.num_output_tokens for each in group.sequences),
        sequences=len(group.live),
        blocks=sum(len(blocks) for table in tables for blocks in table),
        preemptions=group.metrics.num_preemptions,
        events=group.metrics.timeline,
    )


def _maps(scheduler: Scheduler) -> list[BlockMap]:
    manager = scheduler.block_manager
    device = [cache.pool.kinds() for cache in manager.groups]
    # mostly empty, and large
    host = [cache.host_pool.kinds() if cache.host_pool.num_used_blocks else [] for cache in manager.groups]
    for group in scheduler.groups_with_blocks():
        mark = _number(group) << OWNER_SHIFT
        for sequence in group.live:
            table = manager.tables.get(sequence.seq_id)
            if table is None:
                continue
            for cells, blocks in zip(host if table.is_on_host else device, table.blocks, strict=False):
                for block in blocks:
                    cells[block] = cells[block] & _KIND_BITS | mark
    for index, cells in enumerate(device):
        for kind, blocks in ((PINNED, manager.pins.blocks_of(index)), (HELD, manager.holds.blocks_of(index))):
            for block in blocks:
                if cells[block] == USED:  # no request uses it
                    cells[block] = kind
    tiers = [
        *(("device", i, cells) for i, cells in enumerate(device)),
        *(("host", i, cells) for i, cells in enumerate(host)),
    ]
    return [BlockMap(tier, index, array("I", cells[1:]).tobytes()) for tier, index, cells in tiers if len(cells) > 1]
