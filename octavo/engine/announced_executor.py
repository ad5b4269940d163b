"""An executor that announces which requests are new in a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from octavo.core.messages import StepOutputs
from octavo.core.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from octavo.engine.engine_core import EngineCore
    from octavo.executor.executor import Executor


class AnnouncedExecutor:
    """Wraps the executor of a core, and sends before a step which requests it computes for the first time: if the step
    ends the process, the front knows what ran in it."""

    def __init__(self, core: EngineCore, send: Callable[[StepOutputs], None]) -> None:
        self._core = core
        self._executor = core.executor
        self._send = send

    @classmethod
    def around(cls, core: EngineCore, send: Callable[[StepOutputs], None]) -> Executor:
        """Return the executor of a core, announced."""
        return cast("Executor", cls(core, send))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if step.new_sequences:
            groups = [self._core.scheduler.find(each.seq_id)[0] for each in step.new_sequences]
            began = list(dict.fromkeys(group.request_id for group in groups if group is not None))
            self._send(StepOutputs(outputs=[], stats=self._core.stats(), began=began))
        return self._executor.submit(step)
