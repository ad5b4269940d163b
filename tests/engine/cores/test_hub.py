"""Several API servers over the same cores: outputs are those of one server, whatever dies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.messages import SchedulerStats, StepOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores import hub as hub_module
from octavo.engine.cores import replica as replica_module
from octavo.engine.cores.hub import Hub
from octavo.engine.cores.hub_client import HubClient
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.replicas import Replicas
from octavo.errors import EngineDeadError, InvalidRequest, RequestFailed
from tests.engine.cores.test_replicas import deadly_core, eventually, real_core, steps, undisturbed, whole
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.core import engine_config
from tests.fakes.fleet import Fleet, MakeCore

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BACK_OFF_S", 0.001)


class Served:
    """`servers`, each an engine over a hub, and what is behind it. `close(i)` ends the connection of a server."""

    def __init__(self, replicas: list[Replica], cores: Fleet, **settings: Any) -> None:
        self.cores = cores
        self.replicas = replicas
        self.client = Replicas(replicas, **settings)
        self.client.ready.plan = "memory plan"
        self.hub = Hub(self.client)
        self.servers: list[AsyncLLM] = []
        self._serving: list[asyncio.Task[None]] = []

    async def add(self, directory: Path) -> AsyncLLM:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        self._serving.append(asyncio.create_task(self.hub.serve(reader, writer)))
        client = await HubClient.connect(theirs)
        llm = AsyncLLM(engine_config(str(directory)), cast("Replicas", client), byte_tokenizer(directory))
        client.counts = llm.metrics.counts
        self.servers.append(llm)
        return llm

    async def end(self) -> None:
        for llm in self.servers:
            await llm.shutdown()
        await asyncio.gather(*self._serving)


@asynccontextmanager
async def served(
    directory: Path, make_core: MakeCore, count: int = 1, roles: Sequence[str | None] = (None, None), **settings: Any
) -> AsyncIterator[Served]:
    cores = Fleet(make_core)
    replicas = [Replica(number, await cores.start(number), cores.start, 3, roles[number]) for number in range(count)]
    made = Served(replicas, cores, **settings)
    running = asyncio.create_task(made.hub.run())
    for _ in range(2):
        await made.add(directory)
    try:
        yield made
    finally:
        await made.end()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.client.shutdown()
        await cores.end()


async def forever(replicas: Replicas) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("count", [1, 2])
async def test_streams_of_all_servers_end_alike_when_a_core_is_killed(tmp_path: Path, count: int) -> None:
    expected = await undisturbed(tmp_path)
    async with served(tmp_path, real_core(), count) as made:
        reading = [asyncio.create_task(whole(made.servers[number % 2], number)) for number in range(32)]
        await steps(made.servers[0], 6)
        made.replicas[0].client.kill("killed")
        assert await asyncio.gather(*reading) == expected
        await eventually(lambda: all(llm.stats.num_restarts == 1 for llm in made.servers))
        assert [each.stats.num_ready for each in made.servers] == [count, count]
        assert not made.hub._open


async def test_a_request_that_kills_cores_ends_and_those_of_other_servers_go_on(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with served(tmp_path, deadly_core()) as made:
        first, second = made.servers
        reading = [asyncio.create_task(whole(first, number)) for number in range(32)]
        await steps(first, 3)
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        [poisoned] = [output async for output in second.generate([45, 1, 2], params) if output.finished]
        assert poisoned.error is not None
        assert poisoned.error.code == "request_quarantined"
        assert await asyncio.gather(*reading) == expected


async def test_the_requests_of_a_server_that_goes_end_and_free_their_blocks(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with served(tmp_path, real_core()) as made:
        kept = [asyncio.create_task(whole(made.servers[0], number)) for number in range(16)]
        lost = [asyncio.create_task(whole(made.servers[1], number)) for number in range(16, 32)]
        await steps(made.servers[0], 4)
        await made.servers[1].shutdown()
        ends = await asyncio.gather(*lost, return_exceptions=True)
        died = [isinstance(each, EngineDeadError) for each in ends]
        assert any(died)
        # some may have ended before
        assert [each for each, is_dead in zip(ends, died, strict=True) if not is_dead] == [
            each for each, is_dead in zip(expected[16:], died, strict=True) if not is_dead
        ]
        assert await asyncio.gather(*kept) == expected[:16]
        later = await made.add(tmp_path)
        assert await whole(later, 20) == expected[20]
        await eventually(lambda: not later.stats.num_running and not later.stats.num_used_blocks)


async def test_calls_reach_the_cores_and_their_errors_come_back(tmp_path: Path) -> None:
    async with served(tmp_path, real_core(), 2) as made:
        first, second = made.servers
        assert (first.ready.plan, second.ready.plan) == ("memory plan", "")
        await first.check_health()
        assert await first.reset_prefix_cache()
        assert [(each.number, each.state) for each in second.replicas] == [(0, "ready"), (1, "ready")]
        assert await second.drain(1) == 0
        with pytest.raises(InvalidRequest, match="replica is 7"):
            await second.drain(7)
        with pytest.raises(RequestFailed, match="no_such_call"):
            await first.call("no_such_call")


async def test_metrics_are_those_of_all_servers(tmp_path: Path) -> None:
    async with served(tmp_path, real_core()) as made:
        first, second = made.servers
        for number in range(4):
            await whole(made.servers[number == 3], number)
        client = cast("HubClient", first._client)
        await eventually(lambda: first.stats == second.stats)
        text = first.metrics.render(others=await client.counts_of_others()).decode()
        assert first.metrics.render(vllm_names=True, others=await client.counts_of_others()).count(b"vllm:") > 10
        aborted: list[list[str]] = []

        async def abort(names: list[str]) -> int:
            aborted.append(names)
            return 2

        cast("HubClient", second._client).abort = abort
        assert await client.abort_at_others(["a", "b"]) == 2
        assert aborted == [["a", "b"]]
        alone = second.metrics.render().decode()
        assert _value(text, "octavo:request_prompt_tokens_count") == 4
        assert _value(alone, "octavo:request_prompt_tokens_count") == 1
        assert _value(text, "octavo:engine_steps_total") == _value(alone, "octavo:engine_steps_total") > 0


async def test_a_server_that_fails_on_the_question_of_another_one_ends_and_leaves_no_call_open(tmp_path: Path) -> None:
    async with served(tmp_path, real_core()) as made:
        first, second = made.servers

        def fail() -> Any:
            raise ValueError("no counts")

        cast("HubClient", second._client).counts = fail
        await cast("HubClient", first._client).counts_of_others()
        assert "no counts" in str(await second.wait_dead())
        async with asyncio.timeout(100):
            with pytest.raises(EngineDeadError):
                await second.call("stats")
        assert await first.call("stats")


async def test_requests_end_with_an_error_when_the_last_engine_is_removed(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=500, seed=1, ignore_eos=True)

    async def refusal(llm: AsyncLLM) -> str:
        [last] = [output async for output in llm.generate([1, 2, 3], params) if output.finished]
        assert last.error is not None
        return last.error.code

    async with served(tmp_path, real_core(), tend=forever, most_wait_s=0.05) as made:
        begun = asyncio.create_task(refusal(made.servers[0]))
        await steps(made.servers[0], 3)
        await made.client.remove(made.replicas[0])
        assert await begun == "engine_restarting"
        for llm in made.servers:
            await eventually(lambda llm=llm: not llm.replicas)
            assert (llm.stats.num_ready, llm.stats.num_steps >= 3) == (0, True)
            assert await refusal(llm) == "engine_restarting"
        assert (await made.add(tmp_path)).replicas == []


async def test_prompts_that_are_handed_over_count_once_also_when_their_engine_is_removed(tmp_path: Path) -> None:
    async with served(tmp_path, real_core(), 2, ("prefill", "decode"), tend=forever) as made:
        prefill, owners = made.replicas[0], [made.client, *made.servers]
        stats = SchedulerStats(num_steps=3, num_prompt_tokens=7)
        await made.client._take(prefill, StepOutputs(outputs=[], stats=stats))
        for llm in made.servers:
            await eventually(lambda llm=llm: llm.stats.num_steps == 3)
        assert [each.stats.num_prompt_tokens for each in owners] == [0] * 3
        await made.client.remove(prefill)
        for llm in made.servers:
            await eventually(lambda llm=llm: len(llm.replicas) == 1)
        assert [(each.stats.num_steps, each.stats.num_prompt_tokens) for each in owners] == [(3, 0)] * 3


async def test_a_server_that_reads_nothing_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MOST_UNREAD_BYTES", 1 << 16)
    expected = await undisturbed(tmp_path)
    async with served(tmp_path, real_core()) as made:
        reading = asyncio.create_task(whole(made.servers[0], 3))
        frozen = cast("HubClient", made.servers[1]._client)
        frozen._reader._transport.pause_reading()  # type: ignore[attr-defined]
        prompts = [[1, 2, 3]] * 40
        params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True, logprobs=5)
        stuck = asyncio.create_task(_read_all(made.servers[1], prompts, params))
        await eventually(lambda: len(made.hub._links) == 1)
        assert await reading == expected[3]
        frozen._reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError):
            await stuck


async def _read_all(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams) -> None:
    async for _ in llm.generate_together(prompts, params):
        continue


def _value(text: str, name: str) -> float:
    [line] = [each for each in text.splitlines() if each.startswith((name + " ", name + "{"))]
    return float(line.rpartition(" ")[2])
