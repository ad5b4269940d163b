"""What every request and every block did, step by step: taken from a recording while it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.core.step import ScheduledSequence
from octavo.errors import ConfigError
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_table import BlockTable
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.replay import Replay

EMPTY, CACHED = -1, -2
"""In place of a request's number: a block without content, and one whose content may be found again."""


class BlockState(NamedTuple):
    """`request`: the number of the first request that uses the block, or EMPTY or CACHED. `is_shared`: by several
    sequences."""

    request: int
    is_shared: bool = False


class Frame(NamedTuple):
    """One step.

    requests: state of each request that is there, by number: waiting, swapped, prompt, decode, or idle for a running
        one without a row.
    device, host: state of each block, in the order of their ids.
    """

    requests: dict[int, str]
    device: list[BlockState]
    host: list[BlockState]


class Film(NamedTuple):
    """`names`: request ids by number, in the order of arrival, of those too that had ended before the first frame.
    `first_step`: number of the step of the first frame."""

    names: list[str]
    frames: list[Frame]
    first_step: int


def film(
    path: str | Path, first_step: int = 1, num_steps: int = 400, progress: Callable[[float], None] | None = None
) -> Film:
    """Replay a recording and take a frame of each of these steps.

    Raises ConfigError for a file that is no recording, that is decided otherwise by this version, or that ends before.
    """
    for field, value in {"first_step": first_step, "num_steps": num_steps}.items():
        if value < 1:
            raise ConfigError(f"{field} is {value}, must be at least 1")
    replay = Replay(path, progress)
    numbers: dict[str, int] = {}
    frames = []
    for number, step in enumerate(replay.steps(), start=1):
        if not step.is_same or step.step is None:
            raise ConfigError(
                f"{path} cannot be drawn: this version plans step {number} otherwise than it was recorded"
            )
        for request_id in replay.scheduler.groups:
            numbers.setdefault(request_id, len(numbers))
        if number < first_step:
            continue
        rows = {row.seq_id: row for row in step.step.rows}
        frames.append(_frame(replay.scheduler, numbers, rows))
        if len(frames) == num_steps:
            break
    if not frames:
        raise ConfigError(f"{path} has no step {first_step}; the first step to draw must be one that it has")
    return Film(list(numbers), frames, first_step)


def _frame(scheduler: Scheduler, numbers: dict[str, int], rows: dict[int, ScheduledSequence]) -> Frame:
    manager, groups = scheduler.block_manager, scheduler.groups.values()
    return Frame(
        {numbers[group.request_id]: _state(group, rows) for group in groups},
        _blocks(manager.groups[0].pool, _users(groups, numbers, manager.tables, is_on_host=False)),
        _blocks(manager.groups[0].host_pool, _users(groups, numbers, manager.tables, is_on_host=True)),
    )


def _state(group: SequenceGroup, rows: dict[int, ScheduledSequence]) -> str:
    if group.status is not SequenceStatus.RUNNING:
        return str(group.status.value)
    own = [rows[sequence.seq_id] for sequence in group.live if sequence.seq_id in rows]
    if not own:
        return "idle"
    return "prompt" if any(row.num_tokens > 1 or not row.num_samples + row.num_candidates for row in own) else "decode"


def _users(
    groups: Iterable[SequenceGroup], numbers: dict[str, int], tables: Mapping[int, BlockTable], *, is_on_host: bool
) -> dict[int, BlockState]:
    users: dict[int, BlockState] = {}
    for group in groups:
        for sequence in group.live:
            table = tables.get(sequence.seq_id)
            if table is None or not table.blocks or table.is_on_host is not is_on_host:
                continue
            for block in table.blocks[0]:
                first = users.get(block)
                users[block] = (
                    BlockState(numbers[group.request_id]) if first is None else first._replace(is_shared=True)
                )
    return users


def _blocks(pool: BlockPool, users: dict[int, BlockState]) -> list[BlockState]:
    empty = set(pool.empty_blocks())
    unused = {block: BlockState(EMPTY if block in empty else CACHED) for block in range(1, pool.num_blocks + 1)}
    return [users.get(block) or state for block, state in unused.items()]
