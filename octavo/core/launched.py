"""The result of a step that runs beside the host, on a device or in simulated time; reading it waits for the step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from octavo.core.step import ModelRunnerOutput


class LaunchedStep(Future[ModelRunnerOutput]):
    """A step beside the host. `result` collects it, once; `failed` returns what is raised for an error."""

    def __init__(self, collect: Callable[[], ModelRunnerOutput], failed: Callable[[Exception], BaseException]) -> None:
        super().__init__()
        self._collect = collect
        self._failed = failed

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            try:
                self.set_result(self._collect())
            except Exception as error:
                self.set_exception(self._failed(error))
        return super().result(timeout)
