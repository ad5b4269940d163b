"""AsyncLLMEngine: made without an event loop, started by its first request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngineArgs, AsyncLLMEngine, LoRARequest, PoolingParams
from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.config.schema import PoolingConfig
from octavo.core.outputs import RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import Replicas
from octavo.errors import CheckpointError, EngineDeadError
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import ScriptedCore, engine_config
from tests.fakes.served_core import served_core
from tests.server.fake_llm import FakeAsyncLLM

pytestmark = pytest.mark.anyio

PROGRAM = """
import asyncio, sys
from octavo import AsyncEngineArgs, AsyncLLMEngine

engine = AsyncLLMEngine(AsyncEngineArgs(num_gpu_blocks_override=64))

async def use():
    [replica] = (await engine.start())._client._replicas
    if sys.argv[1] == "in the loop":
        engine.shutdown()
    return replica.client._core.process

process = asyncio.run(use())
if sys.argv[1] == "behind it":
    engine.shutdown()
print("ended with", process.wait(30))
"""


@pytest.fixture
async def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[list[EngineArgs]]:
    """The arguments of every engine that was started; each has a scripted core that repeats its prompt."""
    started: list[EngineArgs] = []
    async with AsyncExitStack() as cores:

        async def start(args: EngineArgs) -> AsyncLLM:
            started.append(args)
            client = await cores.enter_async_context(served_core(ScriptedCore()))
            return AsyncLLM(engine_config(str(tmp_path)), Replicas([Replica(0, client)]), byte_tokenizer(tmp_path))

        monkeypatch.setattr(AsyncLLM, "start", start)
        yield started


async def collect(engine: AsyncLLMEngine, *arguments: Any, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*arguments, **options)]


async def test_requests_start_one_engine_between_them(starts: list[EngineArgs]) -> None:
    args = AsyncEngineArgs(max_num_seqs=7)
    engine = AsyncLLMEngine.from_engine_args(args)
    assert starts == []
    read = await asyncio.gather(*(collect(engine, "text", SamplingParams(), name, priority=1) for name in "xy"))
    assert [(outputs[-1].request_id, outputs[-1].outputs[0].text) for outputs in read] == [("x", "text"), ("y", "text")]
    await engine.abort(["x", "y"])
    await engine.check_health()
    assert (await engine.get_tokenizer()).vocab_size > 0
    assert await engine.reset_prefix_cache()
    assert await engine.reset_prefix_cache(reset_running_requests=True)
    assert starts == [args]
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await engine.check_health()


async def test_a_reader_that_leaves_while_the_engine_starts_leaves_it_to_others(starts: list[EngineArgs]) -> None:
    engine = AsyncLLMEngine(AsyncEngineArgs())
    leaving = asyncio.create_task(collect(engine, "a"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await collect(engine, "b"))[-1].outputs[0].text == "b"
    assert len(starts) == 1
    await engine.shutdown()


async def test_a_shutdown_that_nobody_awaits_ends_the_engine(starts: list[EngineArgs]) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs())
    assert (await collect(engine, "a"))[-1].outputs[0].text == "a"
    llm = await engine.start()
    engine.shutdown()
    assert "shut down" in str(await asyncio.wait_for(llm.wait_dead(), 5))
    await engine.shutdown()


@pytest.mark.parametrize("place", ["in the loop", "behind it"])
def test_a_shutdown_at_the_end_of_the_event_loop_or_behind_it_ends_the_core(place: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, place], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("ended with 0\n", 0), ended.stderr


async def test_an_engine_that_never_started_ends_without_starting(starts: list[EngineArgs]) -> None:
    engine = AsyncLLMEngine(AsyncEngineArgs())
    await engine.abort("x")
    await engine.shutdown()
    assert starts == []


async def test_a_wrong_model_is_an_error_of_each_request() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="/no/such/model"))
    for _ in range(2):
        with pytest.raises(CheckpointError):
            await collect(engine, "text")
    await engine.shutdown()


async def test_an_engine_sleeps_and_takes_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeAsyncLLM()

    async def start(args: EngineArgs) -> FakeAsyncLLM:
        return llm

    monkeypatch.setattr(AsyncLLM, "start", start)
    engine = AsyncLLMEngine(AsyncEngineArgs())
    await engine.pause_generation(mode="wait", clear_cache=False)
    assert await engine.is_paused()
    await engine.resume_generation()
    assert not await engine.is_paused()
    await engine.sleep(2)
    assert await engine.is_sleeping()
    await engine.wake_up(["weights"])
    assert not await engine.is_sleeping()
    await engine.sleep()
    await engine.update_weights_from_disk("/other")
    assert not await engine.is_sleeping()
    assert llm.weights == "/other"


async def test_requests_adapters_and_shutdown_have_the_interface_of_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = FakeAsyncLLM()

    async def start(args: EngineArgs) -> FakeAsyncLLM:
        return llm

    monkeypatch.setattr(AsyncLLM, "start", start)
    engine = AsyncLLMEngine(AsyncEngineArgs())
    assert (engine.is_running, engine.errored, engine.is_stopped) == (True, False, False)
    assert await engine.get_supported_tasks() == ("generate",)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    adapter = LoRARequest("a", 7, str(tmp_path))
    assert [await engine.add_lora(adapter) for _ in range(2)] == [True, False]
    assert await engine.list_loras() == {7}
    assert [await engine.remove_lora(7) for _ in range(2)] == [True, False]
    outputs = engine.generate(Prompt(text="ab"), SamplingParams(max_tokens=2))
    await anext(outputs)
    assert engine.get_num_unfinished_requests() == 1
    with pytest.raises(TimeoutError):
        await engine.wait_for_requests_to_drain(0.01)
    await outputs.aclose()
    await engine.wait_for_requests_to_drain()
    llm.die("killed")
    assert (engine.is_running, engine.errored, engine.is_stopped) == (False, True, True)
    assert isinstance(engine.dead_error, EngineDeadError)


async def test_a_model_for_vectors_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeAsyncLLM()
    llm.pooling = PoolingConfig(size=256)

    async def start(args: EngineArgs) -> FakeAsyncLLM:
        return llm

    monkeypatch.setattr(AsyncLLM, "start", start)
    engine = AsyncLLMEngine(AsyncEngineArgs())
    (output,) = [output async for output in engine.encode("ab", PoolingParams(dimensions=2), "one")]
    assert output.request_id == "one"
    assert output.outputs.data.tolist() == [0.0, 97.0]
