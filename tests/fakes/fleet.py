"""Replicas whose cores are served from threads and can be killed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from octavo.async_llm import AsyncLLM
from octavo.core.messages import CoreFailed, CoreReady
from octavo.core.process.processes import report_failure
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.engine.cores.core_client import ProcessClient
from octavo.engine.cores.core_process import serve_core
from octavo.engine.cores.dispatch import Dispatch
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import Replicas
from octavo.engine.cores.router import LeastLoaded, Router
from octavo.engine.cores.split import Split, SplitRates
from octavo.errors import ConfigError
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import engine_config

MakeCore = Callable[[], Any]


class Fleet:
    """Starts cores, each made by `make_core`; `cores` has all of them by replica, the latest last."""

    def __init__(self, make_core: MakeCore) -> None:
        self._make_core = make_core
        self._threads: list[threading.Thread] = []
        self.cores: dict[int, list[Any]] = {}
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.num_failing_starts = 0

    async def start(self, number: int, before: CoreReady | None = None, num_starts: int = 0) -> ProcessClient:
        await self.may_start.wait()
        if self.num_failing_starts:
            self.num_failing_starts -= 1
            raise ConfigError("no room for a core")
        core = self._make_core()
        self.cores.setdefault(number, []).append(core)
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs:
                try:
                    serve_core(core, theirs, announces=hasattr(core, "executor"))
                except RuntimeError as error:
                    report_failure(theirs, CoreFailed(message=str(error)))

        self._threads.append(threading.Thread(target=serve))
        self._threads[-1].start()
        return await ProcessClient.connect(ours)

    async def end(self) -> None:
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 100)
            assert not thread.is_alive(), "a core does not end"


@asynccontextmanager
async def fleet(
    directory: Path, make_core: MakeCore, count: int = 1, *, max_restarts: int = 3, router: Router | None = None,
    max_waiting: int = 100, num_prefills: int = 0, min_tokens: int = 1,
) -> AsyncIterator[tuple[AsyncLLM, Fleet]]:  # fmt: skip
    """An engine of `count` replicas, behind `num_prefills` prefill cores that have the first numbers and get prompts
    from `min_tokens` tokens on."""
    cores = Fleet(make_core)
    roles = ["prefill"] * num_prefills + ["decode" if num_prefills else None] * count
    replicas = [
        Replica(number, await cores.start(number), cores.start, max_restarts, role) for number, role in enumerate(roles)
    ]

    def split(prefills: Sequence[Replica], dispatch: Dispatch) -> Split:
        return Split(prefills, dispatch, LeastLoaded(), block_size=4, rates=SplitRates(min_tokens))

    client = Replicas(replicas, router, max_waiting=max_waiting, make_split=split if num_prefills else None)
    llm = AsyncLLM(engine_config(str(directory)), client, byte_tokenizer(directory))
    try:
        yield llm, cores
    finally:
        await llm.shutdown()
        await cores.end()


class Slow:
    """An executor whose steps take a few milliseconds, in which the front gets to read."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        time.sleep(0.003)
        result: Future[ModelRunnerOutput] = self._executor.submit(step)
        return result


class Deadly:
    """An executor that fails in every step that computes a prompt beginning with `poison`, up to `num_tokens` tokens
    behind it or more."""

    def __init__(self, executor: Any, poison: int, num_tokens: int = 0) -> None:
        self._executor = executor
        self._poison = poison
        self._num_tokens = num_tokens
        self._ends: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for new in step.new_sequences:
            if new.token_ids[:1] == [self._poison]:
                self._ends[new.seq_id] = new.num_prompt_tokens + self._num_tokens
        for row in step.rows:
            if row.seq_id in self._ends and row.start + row.num_tokens >= self._ends[row.seq_id]:
                raise RuntimeError("poisoned")
        result: Future[ModelRunnerOutput] = self._executor.submit(step)
        return result


def kill(llm: AsyncLLM, replica: int = 0, because: str = "killed") -> None:
    """End the connection to a core, as its death does."""
    llm._client._replicas[replica].client.kill(because)
