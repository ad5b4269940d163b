"""Real processes of octavo-tiny that are killed or frozen in mid-stream, over one core, two, and ranks: the streams are
those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.cores import replica as replica_module
from tests.fakes import whole_engines

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_REQUESTS = 16


def started(count: int = 1, **args: Any) -> AbstractAsyncContextManager[AsyncLLM]:
    threads = 1 if count > 1 or os.cpu_count() == 1 else None
    return whole_engines.started(num_gpu_blocks_override=512, threads=threads, data_parallel_size=count, **args)


def params_of(number: int) -> SamplingParams:
    """Seeded, two sequences, penalties, log-probabilities, stop strings; streamed."""
    return SamplingParams(
        max_tokens=16 + number // 2, seed=number, n=2, temperature=0.9, top_p=0.95, presence_penalty=0.3,
        frequency_penalty=0.2, repetition_penalty=1.1, min_tokens=3, logprobs=2, stop=[" the", "ing."][: number % 3],
        output_kind=OutputKind.DELTA,
    )  # fmt: skip


async def read(llm: AsyncLLM, number: int, progress: list[int]) -> Any:
    """What a client reads of a stream, put together, and its usage."""
    texts, token_ids, logprobs, ends = ["", ""], [[], []], [[], []], [None, None]  # type: ignore[var-annotated]
    async for output in llm.generate(f"Once upon a time {number} animals lived", params_of(number)):
        assert output.error is None, output.error
        for each in output.outputs:
            texts[each.index] += each.text
            token_ids[each.index] += each.token_ids
            logprobs[each.index] += each.logprobs or []
            ends[each.index] = (each.finish_reason, each.stop_reason)
        progress[number] = output.num_generated_tokens
    return texts, token_ids, logprobs, ends, (len(output.prompt_token_ids), output.num_generated_tokens)


def processes(llm: AsyncLLM) -> list[subprocess.Popen[bytes]]:
    return [each.client._core.process for each in llm._client._replicas if each.client._core is not None]


def busiest(llm: AsyncLLM) -> subprocess.Popen[bytes]:
    """The core with the most open requests: the others may have ended theirs."""
    core = max(llm._client._replicas, key=lambda each: each.num_open).client._core
    assert core is not None
    return core.process


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def all_streams(llm: AsyncLLM, disturb: Callable[[], Any] | None = None) -> list[Any]:
    return await whole_engines.all_streams(read, llm, NUM_REQUESTS, disturb)


@pytest.fixture
def _frozen_cores_are_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "WATCH_S", 0.2)
    monkeypatch.setattr(replica_module, "FROZEN_AFTER_S", 0.5)


@pytest.mark.usefixtures("_frozen_cores_are_noticed_soon")
async def test_killed_and_frozen_cores_change_no_stream() -> None:
    async with started() as llm:
        expected = await all_streams(llm)
        assert await all_streams(llm, processes(llm)[0].kill) == expected
        assert llm.stats.num_resumed > NUM_REQUESTS // 2
        assert await all_streams(llm, lambda: processes(llm)[0].send_signal(signal.SIGSTOP)) == expected
        assert llm.stats.num_restarts == 2


@pytest.mark.long
@pytest.mark.usefixtures("_frozen_cores_are_noticed_soon")
async def test_one_of_two_cores_and_a_rank_that_are_killed_change_no_stream() -> None:
    async with started() as llm:
        expected = await all_streams(llm)
    async with started(2) as llm:
        assert await all_streams(llm, lambda: busiest(llm).kill()) == expected
        assert llm.stats.num_resumed > 0
    async with started(tensor_parallel_size=2) as llm:
        (rank,) = children(processes(llm)[0].pid)
        assert await all_streams(llm, lambda: os.kill(rank, signal.SIGKILL)) == expected
        assert llm.stats.num_restarts == 1
        assert not Path(f"/proc/{rank}").exists()


FRONT = """
import asyncio
from octavo import AsyncLLM, EngineArgs, SamplingParams

async def main():
    llm = await AsyncLLM.start(EngineArgs(num_gpu_blocks_override=256, threads=1, tensor_parallel_size=2))
    print(llm._client._replicas[0].client._core.process.pid, flush=True)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    async def read(n):
        return [output async for output in llm.generate(f"{n}", params)]
    await asyncio.gather(*map(read, range(4)))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_core_or_rank_outlives_its_front() -> None:
    with subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        core = int(front.stdout.readline())
        pids = [core, *children(core)]
        assert len(pids) == 2
        front.kill()
    deadline = time.monotonic() + 200
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a process has outlived its front"
        time.sleep(0.05)


SPLIT = """
import asyncio
from octavo import AsyncLLM, EngineArgs

async def main():
    llm = await AsyncLLM.start(EngineArgs(num_gpu_blocks_override=256, threads=1, prefill=1, decode=1))
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_cores_of_a_killed_split_server_remove_its_folder() -> None:
    with tempfile.TemporaryDirectory(prefix="o") as name:  # pytest's is too long for sockets
        check_that_no_folder_stays(Path(name))


def check_that_no_folder_stays(parent: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(parent)}
    with subprocess.Popen([sys.executable, "-c", SPLIT], stdout=subprocess.PIPE, env=environment) as front:
        assert front.stdout is not None
        front.stdout.readline()
        (folder,) = parent.glob("octavo-split-*")
        front.kill()
    deadline = time.monotonic() + 200
    while folder.exists():
        assert time.monotonic() < deadline, "the folder has outlived its server"
        time.sleep(0.05)
