"""Carries out the commands of KV transfers that come with steps, beside the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter
from typing import Protocol

import msgspec

from octavo.core import frames
from octavo.kv_transfer.messages import Fetched, LoadBlocks, RankCommands, RankNotes, SaveBlocks

_log = logging.getLogger(__name__)


class Tiers(Protocol):
    """Keep blocks of this rank outside the cache. One thread loads, another one saves."""

    def load(self, command: LoadBlocks) -> int:
        """Write all of the blocks and return their bytes. Whatever is raised is the error of the load."""
        ...

    def save(self, command: SaveBlocks) -> None:
        """Store the blocks. Whatever is raised is logged."""
        ...

    def close(self) -> None:
        """Release files and memory; neither `load` nor `save` is running."""
        ...


class RankTransfer:
    """The rank's half of a connector. Steps call it in one thread; blocks move in others.

    What goes wrong with a transfer ends that transfer with an error in its note, and never a step.
    """

    def __init__(self, notify: Callable[[bytes], None], open_tiers: Callable[[], Tiers]) -> None:
        """notify: sends `RankNotes`, from any thread. open_tiers: called at the first load or save."""
        self._notify = notify
        self._open_tiers = open_tiers
        self._tiers: Tiers | None = None
        self._lock = threading.Lock()

    @contextmanager
    def step(self, payload: bytes) -> Iterator[None]:
        """Enclose the computing of the step that carries these `RankCommands`."""
        commands = msgspec.msgpack.decode(payload, type=RankCommands)
        for load in commands.loads:
            self._loading.submit(self._load, load)
        yield
        for save in commands.saves:
            self._saving.submit(self._save, save)

    def close(self) -> None:
        """End all threads and connections."""
        made = vars(self)
        for thread in ("_loading", "_saving"):
            if thread in made:
                made[thread].shutdown(cancel_futures=True)
        if self._tiers is not None:
            self._tiers.close()

    def _opened_tiers(self) -> Tiers:
        with self._lock:
            if self._tiers is None:
                self._tiers = self._open_tiers()
            return self._tiers

    @cached_property
    def _loading(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "octavo-kv-load")

    @cached_property
    def _saving(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "octavo-kv-save")

    def _load(self, command: LoadBlocks) -> None:
        began, num_bytes, error = perf_counter(), 0, ""
        try:
            num_bytes = self._opened_tiers().load(command)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        fetched = Fetched(command.fetch_id, error, num_bytes, perf_counter() - began)
        self._send(RankNotes(fetched=[fetched]))

    def _save(self, command: SaveBlocks) -> None:
        try:
            self._opened_tiers().save(command)
        except Exception:
            _log.exception("%d blocks were not saved", len(command.digests))
        self._send(RankNotes(saved=[command.save_id]))

    def _send(self, notes: RankNotes) -> None:
        self._notify(frames.encode(notes))
