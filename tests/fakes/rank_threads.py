"""An executor whose ranks are workers in threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config.schema import EngineConfig
from octavo.core.process.rendezvous import Rendezvous
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.distributed.mesh import Mesh
from octavo.executor.executor import OnNote
from octavo.worker.worker import Worker
from tests.distributed.threads import thread_meshes


class ThreadRanks:
    """`Executor` of one worker per mesh, in rank order, each in a thread of its own."""

    def __init__(self, config: EngineConfig, meshes: Sequence[Mesh], on_note: OnNote | None = None) -> None:
        stage = meshes[0].tensor.size
        self.sends_tokens = meshes[0].pipeline.size > 1
        self._result_rank = len(meshes) - stage
        self._meshes = meshes
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(len(meshes))]
        self.workers = self._on_all(
            lambda rank: Worker(
                config,
                rank=rank,
                rendezvous=Rendezvous(),
                open_mesh=lambda *_: meshes[rank],
                notify=None if on_note is None else partial(on_note, rank),
            )
        )

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        def run(rank: int) -> ModelRunnerOutput:
            try:
                return self.workers[rank].submit(step).result()
            except Exception as error:
                self._meshes[rank].poison(f"rank {rank} failed: {type(error).__name__}: {error}")
                raise

        futures = [thread.submit(run, rank) for rank, thread in enumerate(self._threads)]
        return futures[self._result_rank]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        values: list[list[Any]] = self._on_all(lambda rank: self.workers[rank].call(method, *arguments))
        return [value for (value,) in values]

    def shutdown(self) -> None:
        for mesh in self._meshes:
            mesh.poison("the executor is shut down")
        for worker, thread in zip(self.workers, self._threads, strict=True):
            thread.shutdown(wait=True)
            worker.shutdown()

    def _on_all(self, work: Any) -> list[Any]:
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [future.result() for future in futures]


@contextmanager
def llm_of_ranks(
    path: Path,
    tensor: int = 1,
    pipeline: int = 1,
    open_meshes: Callable[[int, int], list[Mesh]] = thread_meshes,
    **keywords: Any,
) -> Iterator[LLM]:
    """An engine whose model is shared by so many ranks; `keywords` are arguments of the engine."""
    with pytest.MonkeyPatch.context() as patch:
        meshes = open_meshes(tensor, pipeline)

        def make(config: EngineConfig, on_death: object = None, on_note: OnNote | None = None) -> ThreadRanks:
            return ThreadRanks(config, meshes, on_note)

        patch.setattr("octavo.engine.engine_core.make_executor", make)
        llm = LLM(
            str(path), **{"threads": 1, **({"max_steps_in_flight": pipeline} if pipeline > 1 else {}), **keywords}
        )
    with llm:
        yield llm
