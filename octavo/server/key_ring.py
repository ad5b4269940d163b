"""The API keys in force: read again on demand, or when their file has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from os.path import expanduser
from pathlib import Path
from typing import Final

from octavo.config.server_args import ServerArgs
from octavo.config.sources import file_stamp
from octavo.errors import ConfigError
from octavo.server.key_file import describe, read_callers
from octavo.server.keys import Caller, Callers
from octavo.server.rate_limits import Meter

_LOOK_INTERVAL_S: Final = 1.0
"""Between two looks at the file, which requests cause: at rest nothing looks."""

logger = logging.getLogger(__name__)


class KeyRing:
    """The callers by the digests of their keys, and what their keys have used of their limits.

    callers: what `read_callers(args)` returned, if the keys were read before. Raises ConfigError for wrong keys.
    """

    def __init__(self, args: ServerArgs, callers: Callers | None = None) -> None:
        self._args = args
        self._file = None if args.api_key_file is None else Path(expanduser(args.api_key_file))
        self._seen = file_stamp(self._file)
        self._next_look = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._meters: dict[str, Meter] = {}
        self._use(read_callers(args) if callers is None else callers)

    def meter_of(self, caller: Caller) -> Meter | None:
        """Return what holds the caller to the limits of its key; None where it has none."""
        return self._meters.get(caller.tenant or "")

    def look(self) -> None:
        """Look beside the event loop whether the file has changed, if that was not done lately, and read it again."""
        if self._file is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_INTERVAL_S
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def reload(self) -> None:
        """Read the keys again; those in force stay where there is an error, which is logged."""
        try:
            self._seen = await asyncio.to_thread(file_stamp, self._file)
            callers = await asyncio.to_thread(read_callers, self._args)
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        self._use(callers)

    async def _look(self) -> None:
        if await asyncio.to_thread(file_stamp, self._file) != self._seen:
            await self.reload()

    def _use(self, callers: Callers) -> None:
        limits = {each.tenant: each.limits for each in callers.values() if each.limits is not None and each.tenant}
        meters: dict[str, Meter] = {}
        for name, limit in limits.items():
            meters[name] = self._meters.get(name) or Meter(name, limit)
            meters[name].set_limits(limit)
        self._meters = meters
        self.callers = callers
        if callers:
            logger.info("%s", describe(callers))
