"""Cores that die, freeze or are drained in mid-stream: every request ends as if nothing had happened, or by name."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.outputs import PinnedPrefix
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.cores import replica as replica_module
from octavo.engine.cores.router import LeastLoaded, RoundRobin
from octavo.errors import EngineDeadError, EngineRestartingError, EngineUnresponsiveError, InvalidRequest, RequestFailed
from tests.fakes.core import ScriptedCore, core_ready, endless
from tests.fakes.engine import make_core
from tests.fakes.fleet import Deadly, Slow, fleet, kill
from tests.fakes.whole_engines import eventually

pytestmark = pytest.mark.anyio

PROMPTS = [[number % 7 + 1, number, number + 3, *range(4, 4 + number % 5)] for number in range(32)]


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BACK_OFF_S", 0.001)


def real_core(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        core = make_core(**({"num_blocks": 512, "max_num_seqs": 64, "max_num_batched_tokens": 64} | options))
        core.executor = Slow(core.executor)
        return core

    return make


def deadly_core(num_tokens: int = 0, **options: Any) -> Callable[[], Any]:
    """A core that a prompt with the token 45 kills, when it has so many tokens."""

    def make() -> Any:
        core = real_core(**options)()
        core.executor = Deadly(core.executor, poison=45, num_tokens=num_tokens)
        return core

    return make


def params_of(number: int) -> SamplingParams:
    """Seeded, two sequences, penalties, log-probabilities; some with a stop string of one or two characters."""
    kind = OutputKind.DELTA if number % 2 else OutputKind.CUMULATIVE
    stop = [chr(number % 40 + 1), "\x07\x08"] if number % 3 == 0 else None
    return SamplingParams(
        max_tokens=30 + number, seed=number, n=1 + number % 2, logprobs=2, stop=stop, presence_penalty=0.5,
        repetition_penalty=1.1, min_tokens=number % 4, output_kind=kind, temperature=0.9,
    )  # fmt: skip


async def whole(llm: AsyncLLM, number: int, prompt: list[int] | None = None) -> Any:
    """All that a caller reads of a request: by sequence text, tokens, log-probabilities, ends; and the usage."""
    sequences: dict[int, Any] = {}
    async for output in llm.generate(prompt or PROMPTS[number], params_of(number)):
        assert output.error is None, output.error
        for each in output.outputs:
            if number % 2 and each.index in sequences:
                old = sequences[each.index]
                each = msgspec.structs.replace(
                    each,
                    text=old.text + each.text,
                    token_ids=old.token_ids + each.token_ids,
                    logprobs=old.logprobs + each.logprobs,
                    text_offsets=old.text_offsets + each.text_offsets,
                )
            sequences[each.index] = each
        usage = len(output.prompt_token_ids), output.num_generated_tokens
    return sequences, usage


_UNDISTURBED: list[Any] = []


async def undisturbed(directory: Path) -> list[Any]:
    """What `whole` reads of every request when no core dies; known after the first test that asks."""
    if not _UNDISTURBED:
        async with fleet(directory, real_core()) as (llm, _):
            _UNDISTURBED.extend(await asyncio.gather(*(whole(llm, number) for number in range(32))))
    return _UNDISTURBED


async def steps(llm: AsyncLLM, count: int) -> None:
    """Wait for so many more steps."""
    wanted = llm.stats.num_steps + count
    async with asyncio.timeout(200):
        while llm.stats.num_steps < wanted:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("count", "depth"), [(1, 3), (2, 1)])
async def test_streams_end_alike_whenever_their_core_is_killed(tmp_path: Path, count: int, depth: int) -> None:
    expected = await undisturbed(tmp_path)
    for num_steps in (1, 6, 15):
        async with fleet(tmp_path, real_core(depth=depth), count) as (llm, cores):
            reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
            await steps(llm, num_steps)
            kill(llm)
            assert await asyncio.gather(*reading) == expected
            assert llm.stats.num_restarts == len(cores.cores[0]) - 1 == 1
            assert llm.stats.num_ready == count


async def test_replicas_that_die_in_turn_lose_nothing(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core(), 2) as (llm, _):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        client = llm._client
        await eventually(lambda: any(entry.has_run for entry in client._dispatch.entries.values()))
        await steps(llm, 5)
        kill(llm, 0)
        await eventually(lambda: not client._replicas[0].is_ready)
        await eventually(
            lambda: not client._dispatch.suspects and all(each.suspect is None for each in client._replicas)
        )
        kill(llm, 1)
        assert await asyncio.gather(*reading) == expected


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("num_tokens", [0, 5])
async def test_request_that_kills_two_cores_ends_and_others_go_on(tmp_path: Path, count: int, num_tokens: int) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, deadly_core(num_tokens), count, router=LeastLoaded()) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 3)
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        [poisoned] = [output async for output in llm.generate([45, 1, 2], params) if output.finished]
        assert poisoned.error is not None
        assert (poisoned.error.code, poisoned.error.is_client_error) == ("request_quarantined", False)
        assert "poisoned" in poisoned.error.message
        assert await asyncio.gather(*reading) == expected
        await eventually(lambda: llm.stats.num_ready == count)
        assert sum(map(len, cores.cores.values())) == count + 2


async def test_a_suspect_beside_which_another_request_kills_the_core_goes_on_alone(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    prompt = [number % 40 + 1 for number in range(300)]

    async def read(llm: AsyncLLM, tokens: list[int]) -> Any:
        [output] = [each async for each in llm.generate(tokens, params) if each.finished]
        return output

    async with fleet(tmp_path, real_core()) as (llm, _):
        expected = (await read(llm, prompt)).outputs
    async with fleet(tmp_path, deadly_core(max_num_batched_tokens=4), max_restarts=9) as (llm, cores):
        innocent = asyncio.create_task(read(llm, prompt))
        entries = llm._client._dispatch.entries
        await eventually(lambda: any(each.has_run for each in entries.values()))
        [entry] = entries.values()
        kill(llm)
        await eventually(lambda: entry.num_deaths == 1 and entry.has_run)  # the only suspect, in its long prompt
        poisoned = asyncio.create_task(read(llm, [45, 1, 2]))
        await eventually(lambda: entry.num_deaths == 2)
        await eventually(lambda: entry.replica is not None)
        later = asyncio.create_task(read(llm, [1, 2, 3]))
        await eventually(lambda: len(entries) == 3)
        assert [each.was_sent for each in entries.values()] == [True, True, False]
        assert (await innocent).outputs == expected
        assert (await poisoned).error.code == "request_quarantined"
        assert (await later).error is None
        assert len(cores.cores[0]) == 4


async def test_requests_that_waited_are_no_suspects(tmp_path: Path) -> None:
    """They are sent again all at once, in their order, as often as the core dies."""
    params = SamplingParams(max_tokens=100, seed=1)
    async with fleet(tmp_path, real_core(max_num_seqs=1)) as (llm, cores):
        ended: list[int] = []

        async def read(number: int) -> None:
            [output] = [each async for each in llm.generate([number], params) if each.finished]
            assert output.error is None
            ended.append(number)

        reading = [asyncio.create_task(read(number)) for number in range(1, 7)]
        entries = llm._client._dispatch.entries
        for number in range(3):
            await eventually(lambda: any(each.has_run for each in entries.values()))
            await steps(llm, 8)
            cores.may_start.clear()
            kill(llm)
            await eventually(lambda: not llm.stats.num_ready)
            assert [each.num_deaths for each in entries.values()] == [1] + [0] * (len(entries) - 1), number
            cores.may_start.set()
        await asyncio.gather(*reading)
        assert ended == [1, 2, 3, 4, 5, 6]


async def test_requests_wait_in_the_front_while_the_core_starts_up_to_a_limit(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), max_waiting=3) as (llm, cores):
        cores.may_start.clear()
        kill(llm)
        await eventually(lambda: not llm.stats.num_ready)
        with pytest.raises(EngineRestartingError):
            await llm.check_health()
        with pytest.raises(EngineRestartingError):
            await llm.call("stats")
        reading = [asyncio.create_task(whole(llm, number)) for number in range(3)]
        await eventually(lambda: llm._client._dispatch.num_waiting() == 3)
        with pytest.raises(EngineRestartingError, match="3 requests wait"):
            await whole(llm, 3)
        reading[1].cancel()
        await asyncio.wait([reading[1]])
        reading[1] = asyncio.create_task(whole(llm, 4))  # one that has ended waits no more
        await eventually(lambda: llm._client._dispatch.num_waiting() == 3)
        assert not reading[1].done()
        with pytest.raises(EngineRestartingError, match="3 requests wait"):
            await whole(llm, 3)
        cores.may_start.set()
        found = await asyncio.gather(*reading)
        await llm.check_health()
        assert found == [await whole(llm, 0), await whole(llm, 4), await whole(llm, 2)]
        assert len(llm._client._dispatch.entries) == 0


@pytest.mark.parametrize(("max_restarts", "error"), [(3, EngineRestartingError), (0, EngineDeadError)])
async def test_a_death_that_a_look_at_the_health_finds_first_says_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int, error: type[Exception]
) -> None:
    async with fleet(tmp_path, real_core(), max_restarts=max_restarts) as (llm, _):

        async def dead() -> None:
            raise EngineDeadError("it was killed")

        monkeypatch.setattr(llm._client._replicas[0].client, "check_health", dead)
        with pytest.raises(error, match="it was killed"):
            await llm.check_health()


async def test_core_that_dies_too_often_is_given_up(tmp_path: Path) -> None:
    async with fleet(tmp_path, lambda: ScriptedCore(reply=endless, fail_at_step=5), max_restarts=2) as (llm, cores):
        with pytest.raises(EngineDeadError, match="2 times within 10 minutes"):
            await asyncio.gather(*(whole(llm, number, [97]) for number in range(3)))
        assert "the fake core fails" in str(await llm.wait_dead())
        assert not llm.is_running
        assert len(cores.cores[0]) == 3
        with pytest.raises(EngineDeadError):
            await llm.check_health()


async def test_failure_of_the_front_ends_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, real_core()) as (llm, _):

        def fails(*_: object) -> None:
            raise KeyError("no such output")

        monkeypatch.setattr(llm._output, "process", fails)
        with pytest.raises(EngineDeadError, match=r"the front failed \(KeyError: 'no such output'\)"):
            await whole(llm, 0)
        assert not llm.is_running
        with pytest.raises(EngineDeadError):
            await whole(llm, 1)


async def test_start_that_fails_counts_as_a_death(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), max_restarts=4) as (llm, cores):
        cores.num_failing_starts = 2
        kill(llm)
        assert await whole(llm, 4)
        cores.num_failing_starts = 5
        kill(llm)
        assert "no room for a core" in str(await llm.wait_dead())


async def test_one_replica_that_is_given_up_leaves_the_others(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core(), 2, max_restarts=0) as (llm, _):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 5)
        kill(llm, 1)
        assert await asyncio.gather(*reading) == expected
        assert llm.stats.num_ready == 1
        await llm.check_health()
        kill(llm, 0, "the last one")
        assert "the last one" in str(await llm.wait_dead())


@pytest.fixture
def soon_frozen(monkeypatch: pytest.MonkeyPatch) -> Callable[[AsyncLLM], None]:
    """Let frozen cores be found within milliseconds; return what makes the first core of an engine look frozen."""
    monkeypatch.setattr(replica_module, "WATCH_S", 0.01)
    monkeypatch.setattr(replica_module, "FROZEN_AFTER_S", 0.05)

    async def hangs() -> None:
        raise EngineUnresponsiveError("it hangs")

    return lambda llm: monkeypatch.setattr(llm._client._replicas[0].client, "check_health", hangs)


async def test_frozen_core_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon_frozen: Callable[[AsyncLLM], None]
) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core()) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 5)
        soon_frozen(llm)
        core = cores.cores[0][0]
        blocked = core.step
        monkeypatch.setattr(core, "step", lambda: (time.sleep(0.2), blocked())[1])
        assert await asyncio.gather(*reading) == expected
        assert llm.stats.num_restarts == 1


async def test_frozen_core_without_requests_is_found_by_a_look_at_its_health(
    tmp_path: Path, soon_frozen: Callable[[AsyncLLM], None]
) -> None:
    async with fleet(tmp_path, real_core()) as (llm, cores):
        soon_frozen(llm)
        await asyncio.sleep(0.1)
        assert len(cores.cores[0]) == 1
        with pytest.raises(EngineUnresponsiveError, match="it hangs; unless it goes on within .* started again"):
            await llm.check_health()
        await eventually(lambda: llm.stats.num_restarts == 1)
        await llm.check_health()
        await eventually(lambda: not llm._client._replicas[0]._busy.is_set())


async def test_frozen_prefill_core_without_requests_is_found_by_a_look_at_the_health_of_all(
    tmp_path: Path, soon_frozen: Callable[[AsyncLLM], None]
) -> None:
    async with fleet(tmp_path, real_core(), num_prefills=1) as (llm, _):
        soon_frozen(llm)
        await llm.check_health()  # the others work
        await eventually(lambda: llm.stats.num_restarts == 1)


async def test_control_call_to_a_frozen_core_without_requests_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soon_frozen: Callable[[AsyncLLM], None]
) -> None:
    async with fleet(tmp_path, real_core()) as (llm, cores):
        soon_frozen(llm)
        may_end = threading.Event()
        monkeypatch.setattr(cores.cores[0][0], "call", lambda *_: may_end.wait(200))
        with pytest.raises(EngineRestartingError, match="died during the call|being started again;"):
            await llm.call("stats")
        may_end.set()
        await eventually(lambda: llm.stats.num_restarts == 1)


@pytest.mark.parametrize("stop", [True, False])
async def test_drained_replica_moves_its_requests(tmp_path: Path, stop: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core(), 2, router=RoundRobin(), max_restarts=0) as (llm, _):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 5)
        num_moved = await llm.drain(0, stop=stop)
        assert 10 < num_moved <= 16
        assert await asyncio.gather(*reading) == expected
        await eventually(lambda: llm.stats.num_ready == (1 if stop else 2))
        assert llm.stats.num_restarts == 0
        # one whose last tokens were on their way has ended meanwhile
        assert 10 < llm.stats.num_resumed <= num_moved
        assert not [each for each in caplog.records if each.levelname == "ERROR"]
        with pytest.raises(InvalidRequest, match="must be one that is ready: "):
            await llm.drain(5)
        if stop:
            with pytest.raises(InvalidRequest, match="the only one that is ready"):
                await llm.drain(1, stop=True)


async def test_single_replica_is_drained_over_a_pause(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core()) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 5)
        assert await llm.drain() > 25
        assert await asyncio.gather(*reading) == expected
        assert len(cores.cores[0]) == 2


async def test_pins_are_set_in_all_cores_and_again_in_a_new_one(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), 2) as (llm, _):
        prefix = list(range(1, 9))
        assert await llm.pin_prefix(prefix, 1e6) == PinnedPrefix(num_tokens=8)
        kill(llm)
        await eventually(lambda: llm.stats.num_restarts == 1)
        for number in range(2):
            client = llm._client._replicas[number].client
            assert await client.call("unpin_prefix", prefix, None, None)
        assert not await llm.unpin_prefix(prefix)


async def test_a_core_is_started_again_as_calls_have_left_it_whose_callers_have_gone(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), 2) as (llm, cores):
        for method, sleeps in (("sleep", True), ("wake_up", False), ("sleep", True)):
            call = asyncio.create_task(llm.call(method))
            await asyncio.sleep(0)
            call.cancel()
            await eventually(lambda sleeps=sleeps: all(each[-1].sleep.is_on == sleeps for each in cores.cores.values()))
        kill(llm)
        await eventually(lambda: llm.stats.num_restarts == 1)
        assert await llm._client._replicas[0].client.call("is_sleeping")


def failing(core: Any, failing_call: str, path: str) -> list[tuple[str, Any]]:
    """Let a call of a core's ranks fail where they have opened this path; return what they have opened, as it grows."""
    call, opened = core.sleep._executor.call, []

    def failing_once(method: str, *arguments: Any) -> Any:
        if method == "open_weights":
            opened.append(arguments[0])
        if method == failing_call and opened[-1] == path:
            return ["the disk is broken"]
        return call(method, *arguments)

    core.sleep._executor.call = failing_once
    return opened


@pytest.mark.parametrize("failing_call", ["open_weights", "load_again"])
@pytest.mark.parametrize("sleeps", [False, True])
async def test_all_replicas_take_other_weights_or_none(tmp_path: Path, failing_call: str, sleeps: bool) -> None:
    async with fleet(tmp_path, real_core(), 2) as (llm, cores):
        opened = [failing(cores.cores[number][0], failing_call, "/bad" if number else "") for number in range(2)]
        await llm.update_weights_from_disk("/first")
        if sleeps:
            await llm.sleep()
        with pytest.raises(RequestFailed, match="the disk is broken") as caught:
            await llm.update_weights_from_disk("/bad")
        assert ("all replicas go on with the weights that they had" in str(caught.value)) == (
            failing_call == "load_again"
        )
        assert await llm.is_sleeping() == sleeps
        if sleeps:
            await llm.wake_up()
        for each, its in zip(cores.cores.values(), opened, strict=True):
            assert (each[0].sleep._path, each[0].sleep.is_on, its[-1]) == (
                "/first",
                False,
                "/bad" if failing_call == "open_weights" and not sleeps else "/first",
            )
        await llm.update_weights_from_disk("/second")
        assert [each[0].sleep._path for each in cores.cores.values()] == ["/second"] * 2
        await whole(llm, 1)


async def test_replicas_whose_first_update_fails_go_back_to_the_weights_of_the_start(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), 2) as (llm, cores):
        opened = failing(cores.cores[1][0], "load_again", "/bad")
        with pytest.raises(RequestFailed, match="the disk is broken"):
            await llm.update_weights_from_disk("/bad")
        assert opened[-1] is None
        assert [each[0].sleep._path for each in cores.cores.values()] == [None] * 2
        assert not await llm.is_sleeping()
        kill(llm)
        await eventually(lambda: llm.stats.num_restarts == 1)
        assert cores.cores[0][-1].sleep._path is None


async def test_calls_name_the_replica_and_add_up(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), 2, router=RoundRobin()) as (llm, _):
        await asyncio.gather(*(whole(llm, number) for number in range(4)))
        timelines = await llm.call("timelines")
        assert sorted(each["replica"] for each in timelines) == [0, 0, 1, 1]
        assert {each["replica"] for each in await llm.call("decisions")} == {0, 1}
        await eventually(lambda: llm.stats.num_running == 0)
        assert (await llm.call("stats"))["num_generated_tokens"] == llm.stats.num_generated_tokens
        text = llm.metrics.render().decode()
        assert 'octavo:engine_steps_total{engine="0",model_name="fake"}' in text
        assert 'octavo:cores_ready{engine="1",model_name="fake"} 1.0' in text
        assert await llm.reset_prefix_cache()


async def test_totals_go_on_when_a_core_is_replaced(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core()) as (llm, cores):
        await whole(llm, 4)
        await eventually(lambda: llm.stats.num_running == 0)
        before = llm.stats
        cores.may_start.clear()
        kill(llm)
        await eventually(lambda: llm.stats.num_ready == 0)
        assert llm.stats.num_generated_tokens == before.num_generated_tokens
        cores.may_start.set()
        await whole(llm, 4)
        await eventually(lambda: llm.stats.num_running == 0)
        assert llm.stats.num_generated_tokens == 2 * before.num_generated_tokens
        text = llm.metrics.render().decode()
        assert f'octavo:generation_tokens_total{{model_name="fake"}} {2.0 * before.num_generated_tokens}' in text
        assert 'octavo:core_restarts_total{model_name="fake"} 1.0' in text


async def test_abort_and_stop_reach_the_core_that_has_the_request(tmp_path: Path) -> None:
    def make() -> ScriptedCore:
        return ScriptedCore(reply=endless, ready=core_ready(max_model_len=10**9, num_blocks=10**8))

    async with fleet(tmp_path, make, 2, router=RoundRobin()) as (llm, cores):
        params = SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)
        streams = [llm.generate([98], params, f"r{number}") for number in range(4)]
        for stream in streams:
            await anext(stream)
        await llm.abort(["r0", "r3"])
        await eventually(lambda: [cores.cores[number][0].aborted for number in (0, 1)] == [["r0"], ["r3"]])
        stopping = llm.generate([98], SamplingParams(max_tokens=None, stop="aaa"), "s")
        assert [output.finished async for output in stopping][-1]
        await eventually(lambda: cores.cores[0][0].stopped == [("s", 0)])
        assert set(llm._client._dispatch.entries) == {"r1", "r2"}
        for stream in streams:
            await stream.aclose()
