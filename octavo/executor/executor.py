"""The protocol between the control plane and the device plane."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from octavo.core.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig


class Executor(Protocol):
    """Carries steps to the workers and their results back. Steps take effect in the order of submission."""

    @property
    def sends_tokens(self) -> bool:
        """True when a worker computes rows whose tokens it does not draw: the scheduler sends them with the steps."""
        ...

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step. Its result is ready at once (in-process) or later; `result()` raises what the worker raised."""
        ...

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Make a named control call on every worker and return their values, one per rank.

        `prepare` and `allocate` come first, once each.
        """
        ...

    def shutdown(self) -> None:
        """Release the workers. Idempotent."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Return the executor that the configuration asks for, its model opened but not loaded. Imports torch.

    Raises ConfigError or CheckpointError.
    """
    from octavo.worker.ahead import collector_paused, read_ahead

    with collector_paused():
        ahead = read_ahead(config)
        from octavo.worker.worker import Worker

        return Worker(config, ahead)


def import_ahead() -> None:
    """Import what a worker needs in a thread, while the caller waits for its configuration.

    Only for a process that runs nothing but an engine: it gets torch without what an engine never uses.
    """
    threading.Thread(target=_import_worker, name="octavo-import", daemon=True).start()


def _import_worker() -> None:
    from octavo.executor.light_torch import without_meta_registrations
    from octavo.worker.ahead import collector_paused

    # who needs the module imports it again, and meets what goes wrong with it
    with suppress(ImportError), collector_paused(), without_meta_registrations():
        import_module("octavo.worker.worker")
