"""The worker in this process: a step runs when it is submitted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig
    from octavo.worker.worker import Worker

CALLS = ("prepare", "allocate", "op_choices", "time_steps", "release_memory")
"""Methods of the worker that may be called by name."""

_START = ("prepare", "allocate")


class InprocExecutor:
    """`Executor` around one worker. Used by one thread at a time, like the worker itself."""

    sends_tokens = False
    """The worker draws all tokens itself."""

    def __init__(self, worker: Worker) -> None:
        self._worker: Worker | None = worker
        self._failure: str | None = None

    @classmethod
    def build(cls, config: EngineConfig) -> InprocExecutor:
        """Open the model. Raises ConfigError or CheckpointError."""
        from octavo.worker.ahead import read_ahead

        with collector_paused():
            ahead = read_ahead(config)
            from octavo.worker.worker import Worker

            return cls(Worker(config, ahead))

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run the step; the future is done, with the result or with what the worker raised."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self._living().execute(step))
        except Exception as error:
            # a step that broke off leaves sequences half changed: nothing after it can be right
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            future.set_exception(error)
        return future

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker by name, one of `CALLS`, and return its value in a list."""
        if method not in CALLS:
            raise ConfigError(f"{method} is not a call of the worker; there are: {', '.join(CALLS)}")
        call = getattr(self._living(), method)
        # what is loaded stays: looking for garbage among it costs a tenth of a start
        with collector_paused() if method in _START else nullcontext():
            return [call(*arguments)]

    def shutdown(self) -> None:
        """Let go of the worker and its memory."""
        if self._worker is not None:
            self._worker.shutdown()
        self._worker = None

    def _living(self) -> Worker:
        if self._failure is not None:
            raise EngineDeadError(f"the worker failed in an earlier step: {self._failure}")
        if self._worker is None:
            raise EngineDeadError("the executor is shut down")
        return self._worker


@contextmanager
def collector_paused() -> Iterator[None]:
    """What is imported and loaded stays: looking for garbage among it costs a tenth of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
