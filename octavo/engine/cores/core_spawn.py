"""The process of an engine core, which may start before it is known what it will run.

It imports what every engine needs while it waits for its configuration.
"""

from __future__ import annotations

from typing import Self

from octavo.core.process import processes
from octavo.core.process.processes import SHUTDOWN_TIMEOUT_S


class SpawnedCore:
    """The process of a core and this end of its connection.

    The end of a `with` block ends the process unless `is_used` was set, as the client of the core does.
    """

    def __init__(self, module: str = "octavo.engine.cores.core_process") -> None:
        """module: what runs in the process."""
        self.connection, self.process = processes.spawn(module)
        self.is_used = False

    def end(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Wait for the process to end, with force when that takes longer than `timeout_s`."""
        processes.end(self.process, timeout_s)

    def discard(self) -> None:
        """End the process unless it is used."""
        if not self.is_used:
            self.connection.close()  # upon which it ends by itself
            self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()
