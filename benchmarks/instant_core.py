"""An engine core that answers at once, and `octavo serve` over it: `python -m benchmarks.instant_core serve ARGUMENTS`.

Scheduler, messages and processes are the real ones. Instead of the model, which is loaded and not computed, every row
that draws gets the same token: what is left is the cost of the front.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from octavo.cli.main import build_app, invoke
from octavo.core.step import ModelRunnerOutput, RowOutput, SchedulerOutput, TokenLogprobs
from octavo.engine.cores import core_process
from octavo.engine.cores.core_spawn import SpawnedCore

_TOKEN_ID: Final = 300


class InstantExecutor:
    """Draws the same token in every row; control calls reach the executor below."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        result: Future[ModelRunnerOutput] = Future()
        drawn = TokenLogprobs(token_id=_TOKEN_ID)
        rows = [RowOutput(row.seq_id, row.epoch, [drawn] * row.num_samples) for row in step.rows]
        result.set_result(ModelRunnerOutput(step_id=step.step_id, rows=rows))
        return result


def _build(build: Any, *arguments: Any) -> Any:
    core = build(*arguments)
    core.executor = InstantExecutor(core.executor)
    return core


def main() -> int:
    if sys.argv[1] == "serve":
        return invoke(build_app(SpawnedCore("benchmarks.instant_core")), sys.argv[1:])
    core_process.build_core = partial(_build, core_process.build_core)
    return core_process.main()


if __name__ == "__main__":
    sys.exit(main())
