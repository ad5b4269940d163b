"""Replays a recorded run: gives the same inputs to a new scheduler, and compares the steps that it plans."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from os.path import expanduser
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from octavo.core.messages import AbortRequests, AddRequests, EngineCoreOutput, SchedulerStats, StopSequence
from octavo.core.step import SchedulerOutput
from octavo.engine.recorder import (
    RECORDING_VERSION,
    Began,
    Event,
    Held,
    Pinned,
    Planned,
    PrefixCacheReset,
    Unpinned,
    Updated,
    step_digest,
)
from octavo.errors import ConfigError
from octavo.scheduler.build import build_scheduler
from octavo.scheduler.draft_choices import GivenChoices
from octavo.scheduler.scheduler import Scheduler

_LENGTH: Final = struct.Struct("<I")


class ReplayedStep(NamedTuple):
    """A step as the replay planned it, and whether it is the recorded one (None: no step)."""

    step: SchedulerOutput | None
    is_same: bool


Applied = ReplayedStep | list[EngineCoreOutput] | bool | None


class ReplayResult(NamedTuple):
    """The result of a replay. `first_difference`: number of the first step that differs; None if none does. num_steps:
    number of equal steps.
    """

    num_steps: int
    num_requests: int
    first_difference: int | None
    stats: SchedulerStats


def read_recording(path: str | Path, progress: Callable[[float], None] | None = None) -> Iterator[Event]:
    """Yield the events of a recording; the first is `Began`. An incomplete last event, as a crash leaves it, is
    skipped.

    `progress` is called with the share of the file that has been read.

    Raises ConfigError when the file cannot be read or is no recording of this version.
    """
    try:
        data = Path(expanduser(path)).read_bytes()
    except OSError as error:
        raise ConfigError(f"the recording {str(path)!r} cannot be read: {error.strerror}") from error
    decoder = msgspec.msgpack.Decoder(Event)
    offset = 0
    while offset + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, offset)
        body = data[offset + _LENGTH.size : offset + _LENGTH.size + size]
        if len(body) < size:
            break
        if offset == 0:
            _check_version(path, body)
        try:
            event: Event = decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not a recording, or is damaged at byte {offset}: {error}") from error
        if offset == 0 and not isinstance(event, Began):
            raise ConfigError(f"{path} does not begin with the settings of a scheduler: it is not a whole recording")
        yield event
        offset += _LENGTH.size + size
        if progress is not None:
            progress(offset / len(data))
    if offset == 0:
        raise ConfigError(f"{path} is not a recording; one is written by octavo serve --record-trace FILE")


class _Version(msgspec.Struct, frozen=True, tag="began"):
    """`Began` of any version, whose settings may have another form."""

    version: int


def _check_version(path: str | Path, body: bytes) -> None:
    try:
        version = msgspec.msgpack.decode(body, type=_Version).version
    except msgspec.DecodeError:
        return  # not a `Began`; the caller raises the error
    if version != RECORDING_VERSION:
        raise ConfigError(f"{path} is a recording of version {version}, this octavo reads version {RECORDING_VERSION}")


class Replay:
    """Gives the events of a recording to a scheduler with its settings. The attribute `scheduler` may be read between
    two events."""

    def __init__(self, path: str | Path, progress: Callable[[float], None] | None = None) -> None:
        self._events = read_recording(path, progress)
        began = next(self._events)
        assert isinstance(began, Began)
        self.settings = began.settings
        self._choices = GivenChoices() if began.speculates else None
        self.scheduler: Scheduler = build_scheduler(began.settings, self._choices)
        self.num_requests = 0

    def steps(self) -> Iterator[ReplayedStep]:
        """Yield every planned step up to the first that differs: recorded results after it belong to other steps."""
        return (result for _, result in self.events() if isinstance(result, ReplayedStep))

    def events(self) -> Iterator[tuple[Event, Applied]]:
        """Yield every event and its result.

        The result of `Planned` is a step if there was one, of `Updated` outputs, of `PrefixCacheReset` its success.
        """
        for event in self._events:
            result = self._apply(event)
            yield event, result
            if isinstance(result, ReplayedStep) and not result.is_same:
                return

    def _apply(self, event: Event) -> Applied:
        scheduler = self.scheduler
        match event:
            case AddRequests(requests):
                self.num_requests += len(requests)
                scheduler.add_together(requests)
            case AbortRequests(request_ids):
                scheduler.abort(request_ids)
            case StopSequence(request_id, index):
                scheduler.stop_sequence(request_id, index)
            case Updated(now, output):
                return scheduler.update(output, now)
            case PrefixCacheReset(preempts):
                return scheduler.reset_prefix_cache(preempts=preempts)
            case Held(what):
                scheduler.hold(what)
            case Pinned(token_ids, cache_key, until):
                scheduler.pin_prefix(token_ids, cache_key, until)
            case Unpinned(token_ids, cache_key):
                scheduler.unpin_prefix(token_ids, cache_key)
            case Planned(now, digest, choices):
                if self._choices is not None and choices is not None:
                    self._choices.give(choices)
                step = scheduler.schedule(now)
                is_same = step_digest(step) == digest
                return ReplayedStep(step, is_same) if step is not None or not is_same else None
        return None

    def run(self) -> ReplayResult:
        """Replay the whole recording, or the part up to the first difference."""
        num_planned = num_same = 0
        for step in self.steps():
            num_planned, num_same = num_planned + 1, num_same + step.is_same
        first_difference = num_planned if num_same < num_planned else None
        return ReplayResult(num_same, self.num_requests, first_difference, self.scheduler.stats())
