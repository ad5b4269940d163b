"""Records all that goes into a scheduler, so that a replay takes the same decisions (octavo/simulate/replay.py).

The file is a sequence of frames (octavo/core/process/frames.py): first the settings, then in their order requests,
aborts, stops, pins, resets, pauses, the time of each call of `schedule` with a digest of the step that it planned, and
the time and results of each call of `update`. MessagePack and not JSON, because log-probabilities may be infinite.

Salts and namespaces are secrets of the senders. A recording replaces them by other words; within it, equal salts have
equal words.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import msgspec

from octavo.core.cache_key import CacheKey
from octavo.core.messages import AbortRequests, AddRequests, EngineCoreOutput, EngineCoreRequest, StopSequence
from octavo.core.outputs import PinnedPrefix
from octavo.core.process import frames
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.scheduler.draft_choices import DraftChoices, NotedChoices
from octavo.scheduler.drafts import Proposer
from octavo.scheduler.scheduler import Holding, Scheduler

RECORDING_VERSION: Final = 10

_log = logging.getLogger(__name__)


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The first frame: the settings of the scheduler, how many steps are planned ahead, and whether it speculates."""

    settings: SchedulerSettings
    max_steps_in_flight: int
    speculates: bool = False
    version: int = RECORDING_VERSION


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """`schedule` was called at `now`; `digest` is of the step that it returned, None when there was none. choices: the
    guesses that it was given, where it speculates."""

    now: float
    digest: str | None
    choices: DraftChoices | None = None


class Updated(msgspec.Struct, frozen=True, tag="updated"):
    """`update` was called at `now`."""

    now: float
    output: ModelRunnerOutput


class PrefixCacheReset(msgspec.Struct, frozen=True, tag="cache_reset"):
    """`reset_prefix_cache` was called."""

    preempts: bool = False


class Held(msgspec.Struct, frozen=True, tag="held"):
    """`hold` was called."""

    what: Holding


class Pinned(msgspec.Struct, frozen=True, tag="pinned"):
    """`pin_prefix` was called. `until` is on the clock of `Planned`."""

    token_ids: list[int]
    cache_key: CacheKey
    until: float


class Unpinned(msgspec.Struct, frozen=True, tag="unpinned"):
    """`unpin_prefix` was called."""

    token_ids: list[int]
    cache_key: CacheKey


Keyed = TypeVar("Keyed", EngineCoreRequest, CacheKey)

Event = (
    Began | AddRequests | AbortRequests | StopSequence | Planned | Updated | PrefixCacheReset | Held | Pinned | Unpinned
)


def step_digest(step: SchedulerOutput | None) -> str | None:
    """Return 16 hexadecimal digits that differ when two steps differ."""
    return None if step is None else hashlib.sha256(msgspec.msgpack.encode(step)).hexdigest()[:16]


class Recorder:
    """Appends events to a file. Each reaches it at once: the recording of a crash is the most useful one.

    When the file can be written no longer (the disk is full), that is logged once and the recording ends there: what is
    in the file stays, and the engine goes on. proposer: notes the answers of the given proposer.
    """

    def __init__(
        self, path: str, settings: SchedulerSettings, max_steps_in_flight: int, proposer: Proposer | None = None
    ) -> None:
        self.proposer = None if proposer is None else NotedChoices(proposer)
        self._path = path
        self._disguise = secrets.token_bytes(32)
        self._file: BinaryIO | None = None
        try:
            file = Path(expanduser(path))
            self._file = file.open("wb")
            self._append(self._file, Began(settings, max_steps_in_flight, speculates=proposer is not None))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"record_trace is {path!r}, which cannot be written: {error.strerror}; give another file, or leave "
                "it out"
            ) from error

    def write(self, event: Event) -> None:
        if self._file is None:
            return
        match event:
            case AddRequests(requests):
                event = AddRequests([self._disguised(request) for request in requests])
            case Pinned() | Unpinned():
                event = msgspec.structs.replace(event, cache_key=self._disguised(event.cache_key))
        try:
            self._append(self._file, event)
        except OSError as error:
            _log.warning(
                "record_trace is %r, which cannot be written any more: %s; recording has stopped",
                self._path,
                error.strerror,
            )
            self.close()

    def _disguised(self, keyed: Keyed) -> Keyed:
        if not keyed.cache_salt and keyed.cache_namespace is None:
            return keyed
        words = [
            word and hmac.digest(self._disguise, ascii(word).encode(), "sha256").hex()[:32]
            for word in (keyed.cache_salt, keyed.cache_namespace)
        ]
        return msgspec.structs.replace(keyed, cache_salt=words[0], cache_namespace=words[1])

    @staticmethod
    def _append(file: BinaryIO, event: Event) -> None:
        file.write(frames.pack(event))
        file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            # closing writes once more what a failed write left in the buffer; that failure has been logged
            with contextlib.suppress(OSError):
                file.close()


class RecordedScheduler:
    """Wraps a scheduler and writes down each call that changes its state; all else passes through. Calls about
    adapters, sleep and transfers are not among these: the configuration refuses them beside a recording."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._write = recorder.write
        self._choices = recorder.proposer

    @classmethod
    def around(cls, scheduler: Scheduler, recorder: Recorder) -> Scheduler:
        """Return a scheduler that is recorded; it has the recorder's proposer."""
        return cast("Scheduler", cls(scheduler, recorder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add_together(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._write(AddRequests(list(requests)))
        self._scheduler.add_together(requests)

    def abort(self, request_ids: Iterable[str], now: float | None = None) -> None:
        aborted = AbortRequests(list(request_ids))
        self._write(aborted)
        self._scheduler.abort(aborted.request_ids, now)

    def stop_sequence(self, request_id: str, index: int, now: float | None = None) -> None:
        self._write(StopSequence(request_id, index))
        self._scheduler.stop_sequence(request_id, index, now)

    def schedule(self, now: float) -> SchedulerOutput | None:
        step = self._scheduler.schedule(now)
        self._write(Planned(now, step_digest(step), None if self._choices is None else self._choices.take()))
        return step

    def update(self, output: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        self._write(Updated(now, output))
        return self._scheduler.update(output, now)

    def reset_prefix_cache(self, *, preempts: bool = False) -> bool:
        self._write(PrefixCacheReset(preempts))
        return self._scheduler.reset_prefix_cache(preempts=preempts)

    def hold(self, what: Holding) -> None:
        self._write(Held(what))
        self._scheduler.hold(what)

    def pin_prefix(self, token_ids: list[int], cache_key: CacheKey, until: float) -> PinnedPrefix:
        self._write(Pinned(token_ids, cache_key, until))
        return self._scheduler.pin_prefix(token_ids, cache_key, until)

    def unpin_prefix(self, token_ids: list[int], cache_key: CacheKey) -> bool:
        self._write(Unpinned(token_ids, cache_key))
        return self._scheduler.unpin_prefix(token_ids, cache_key)
