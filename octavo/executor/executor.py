"""The protocol between the control plane and the device plane."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final, Protocol

from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.platform import usable_cores

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig
    from octavo.worker.worker import Worker


class Executor(Protocol):
    """Carries steps to the workers and their results back. Steps take effect in the order of submission."""

    @property
    def sends_tokens(self) -> bool:
        """True when a worker computes rows whose tokens it does not draw: the scheduler sends them with the steps."""

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step, whose result is ready at once or later; `submit` or the future raises what a worker raised."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Make a named control call on every worker and return their values, one per rank.

        `prepare`, `load` and `allocate` come first, once each.
        """

    def shutdown(self) -> None:
        """Release the workers. Idempotent."""


class RankWorker(Executor, Protocol):
    """One rank of several: what the worker is to the executor of all ranks. The future of a step is done, or its
    `result` waits for what was launched."""

    def poison(self, reason: str) -> None:
        """Make what waits for other ranks raise EngineDeadError with this reason; from any thread."""


Notify = Callable[[bytes], None]
"""Sends a note of the workers' half of a KV connector to the scheduler's half; from any thread."""

Meet = Callable[[Callable[[], Any]], Any]
"""Calls a function that waits for other ranks, and returns its result."""

OpenWorker = Callable[["EngineConfig", int, Rendezvous | None, Notify | None, Meet | None], RankWorker]
"""Opens the worker of a rank: its configuration, its number, where the ranks meet, what sends its notes, what opens the
groups in which it waits for other ranks."""

OnNote = Callable[[int, bytes], None]
"""Called with the number of a rank and a note of it, from any thread."""


OnDeath = Callable[[str], None]
"""Called with the reason, from any thread, as soon as a rank has failed or died."""

StartRanks = Callable[["EngineConfig", OnDeath | None, OnNote | None], Executor]
"""Starts the ranks of a configuration, their models opened but not loaded; raises ConfigError where it cannot."""

EXECUTORS: Final = {
    "multiprocess": "octavo.executor.ranks:start_ranks",
    "ray": "octavo.executor.ray:start_ray_ranks",
}
"""Value of the option `executor` → the `StartRanks` of several ranks, which is imported when it is used."""


def make_executor(config: EngineConfig, on_death: OnDeath | None = None, on_note: OnNote | None = None) -> Executor:
    """Return the executor that the configuration asks for, its model opened but not loaded. Imports torch.

    on_note: called with what the workers' half of a KV connector sends; None without one.

    Raises ConfigError or CheckpointError.
    """
    num_ranks = config.device.num_ranks
    if num_ranks == 1:
        return open_rank(config, notify=None if on_note is None else partial(on_note, 0))
    if num_ranks > usable_cores():  # so many processes may take minutes to start: what is wrong is found before
        from octavo.worker.start.opening import check_sizes

        check_sizes(config)
    start: StartRanks = resolve_name(EXECUTORS[config.device.executor])
    return start(config, on_death, on_note)


def open_rank(
    config: EngineConfig,
    rank: int = 0,
    rendezvous: Rendezvous | None = None,
    notify: Notify | None = None,
    meet: Meet | None = None,
) -> Worker:
    """Return the worker of a rank, its model opened but not loaded. rendezvous: where the ranks meet. notify: sends the
    notes of a KV connector. meet: opens the groups in which the rank waits for others.

    Raises ConfigError or CheckpointError.
    """
    from octavo.worker.start.ahead import collector_paused, read_ahead

    with collector_paused():
        ahead = read_ahead(config, rank)
        from octavo.worker.worker import Worker

        return Worker(config, ahead, rank, rendezvous, notify=notify, meet=meet)


def import_ahead() -> None:
    """Call `import_worker` in a thread, while the caller waits for its configuration."""
    threading.Thread(target=import_worker, name="octavo-import", daemon=True).start()


def import_worker() -> None:
    """Import what a worker needs.

    Only for a process that runs nothing but an engine: it gets torch without what an engine never uses.
    """
    from octavo.core.light_torch import without_meta_registrations
    from octavo.worker.start.ahead import collector_paused

    # who needs the module imports it again, and meets what goes wrong with it
    with suppress(ImportError), collector_paused(), without_meta_registrations():
        import_module("octavo.worker.worker")
        gc.freeze()  # what is imported stays: the next collections search none of it
