"""The seam between the control plane and the device plane."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from octavo.core.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig


class Executor(Protocol):
    """Carries steps to the workers and their results back. Steps take effect in the order of submission."""

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step. Its result is ready at once (in-process) or later; `result()` raises what the worker raised."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:
        """A named control call on every worker; answers the first one's value. `memory_plan` is one."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError when a worker is gone."""
        ...

    def shutdown(self) -> None:
        """Release the workers. Idempotent."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """The executor that the configuration asks for. Loads the model; takes seconds and imports torch."""
    from octavo.executor.inproc import InprocExecutor

    return InprocExecutor.build(config)
