"""A pause of generation: requests are held back, and what runs ends, is aborted, or stays where it is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.engine.engine_core import EngineCore

MODES: Final = ("abort", "wait", "keep")

_log = logging.getLogger(__name__)


class Pause:
    """Whether the requests of a core are held back. New ones wait, within the limits of the queue. is_on: whether a
    pause is on.
    """

    def __init__(self, core: EngineCore) -> None:
        self.is_on = False
        self._core = core
        self._clears_cache = False

    def begin(self, mode: str, clear_cache: bool) -> bool:
        """Hold requests back until `end`, and return what `is_complete` does; it may have to be asked again.

        mode: "wait" lets those that have begun go on to their end, "abort" ends all, and "keep" lets them wait with
        their blocks. clear_cache: forget cached prefixes and pins then, as `EngineCore.reset_prefix_cache` does with
        `preempts`. Raises InvalidRequest.
        """
        check_mode(mode)
        core = self._core
        self.is_on, self._clears_cache = True, clear_cache
        core.scheduler.hold("new" if mode == "wait" else "all")
        if mode != "wait":
            core.finish_steps()
        if mode == "abort":
            core.end_requests()
        _log.info("generation is paused (mode %s)", mode)
        return self.is_complete()

    def is_complete(self) -> bool:
        """Return whether nothing runs any more, all outputs were sent, and the cache is cleared if that was wanted, for
        which transfers of blocks have to end first. True also when no pause is on.
        """
        core = self._core
        if not self.is_on:
            return True
        if core.scheduler.holding == "new":
            if core.scheduler.has_begun and not core.sleep.is_on:  # which nothing goes on in
                return False
            core.scheduler.hold("all")  # also those that come again from a core that has died
        core.finish_steps()
        if self._clears_cache:
            core.scheduler.end_transfers()  # one may wait for a prompt that no paused core computes
            if not core.reset_prefix_cache(preempts=True):
                return False
        self._clears_cache = False
        return not core.has_news

    def end(self) -> None:
        """Let requests go on. Without a pause nothing happens."""
        if self.is_on:
            self.is_on = False
            self._core.scheduler.hold(None)
            self._core.is_waiting = False
            _log.info("generation goes on")


def check_mode(mode: str) -> None:
    """Raise InvalidRequest for another mode than those of vLLM."""
    if mode not in MODES:
        raise InvalidRequest(f"mode is {mode!r}, must be {', '.join(MODES[:-1])} or {MODES[-1]}", field="mode")
