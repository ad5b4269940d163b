"""Writes down all that goes into a scheduler, so that a replay takes the same decisions (octavo/simulate/replay.py).

The file is a sequence of frames (octavo/engine/frames.py): first the settings, then in their order requests, aborts,
stops, pins, resets, each time that `schedule` is told with a digest of the step it planned, and each result that
`update` is given with its time. MessagePack and not JSON, because log-probabilities may be infinite.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from octavo.core.cache_key import CacheKey
from octavo.core.messages import EngineCoreRequest
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.engine import frames
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings

RECORDING_VERSION: Final = 3


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The first frame: what the scheduler is made of, and how many steps are planned ahead."""

    settings: SchedulerSettings
    max_steps_in_flight: int
    version: int = RECORDING_VERSION


class Added(msgspec.Struct, frozen=True, tag="added"):
    """Requests came, together."""

    requests: list[EngineCoreRequest]


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """`abort` was called."""

    request_ids: list[str]


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """`stop_sequence` was called."""

    request_id: str
    index: int


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """`schedule` was called at `now`; `digest` is of the step that it answered, None when there was none."""

    now: float
    digest: str | None


class Updated(msgspec.Struct, frozen=True, tag="updated"):
    """`update` was called at `now`."""

    now: float
    output: ModelRunnerOutput


class CacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    """`reset_prefix_cache` was called."""


class Pinned(msgspec.Struct, frozen=True, tag="pinned"):
    """`pin_prefix` was called. `until` is on the clock of `Planned`."""

    token_ids: list[int]
    cache_key: CacheKey
    until: float


class Unpinned(msgspec.Struct, frozen=True, tag="unpinned"):
    """`unpin_prefix` was called."""

    token_ids: list[int]
    cache_key: CacheKey


Event = Began | Added | Aborted | Stopped | Planned | Updated | CacheReset | Pinned | Unpinned


def step_digest(step: SchedulerOutput | None) -> str | None:
    """16 hexadecimal digits that differ when two steps differ."""
    return None if step is None else hashlib.sha256(msgspec.msgpack.encode(step)).hexdigest()[:16]


class Recorder:
    """Appends events to a file. Each reaches it at once: the recording of a crash is the most useful one."""

    def __init__(self, path: str, settings: SchedulerSettings, max_steps_in_flight: int) -> None:
        try:
            self._file: BinaryIO = Path(path).expanduser().open("wb")
        except OSError as error:
            raise ConfigError(f"record_trace is {path!r}, which cannot be written: {error.strerror}") from error
        self.write(Began(settings, max_steps_in_flight))

    def write(self, event: Event) -> None:
        self._file.write(frames.pack(event))
        self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
