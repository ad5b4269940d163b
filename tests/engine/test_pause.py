"""A pause holds requests back, and each goes on afterwards as if there had been none, or ends as the mode says."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest
from octavo.core.outputs import WeightVersionSpan
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores import replica as replica_module
from octavo.engine.cores.replica import Replica
from octavo.engine.engine_core import EngineCore
from octavo.errors import InvalidRequest, RequestFailed
from tests.engine.cores.test_hub import served
from tests.engine.cores.test_replicas import PROMPTS as READ_PROMPTS
from tests.engine.cores.test_replicas import eventually, kill, real_core, steps, undisturbed, whole
from tests.fakes.accounting import check_scheduler
from tests.fakes.engine import make_core, make_request
from tests.fakes.fleet import Fleet, fleet

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, number] for number in range(6)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"depth": 3, "sliding_window": (None, 4)},
    {"sends_tokens": True, "depth": 2},
    {"num_blocks": 16, "num_host_blocks": 16, "preemption_mode": "swap"},
    {"num_blocks": 16, "enable_chunked_prefill": False},
    {"policy": "priority", "num_blocks": 16},
]


def requests() -> list[EngineCoreRequest]:
    """Six that share a prefix; each is more urgent than those before it."""
    each = [make_request(f"r{number}", prompt, max_tokens=12, seed=number) for number, prompt in enumerate(PROMPTS)]
    for number, request in enumerate(each):
        request.priority = -number
    return each


class Reader:
    """The core's requests as a front reads them: tokens, and whether they have ended."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}

    def step(self) -> list[EngineCoreOutput]:
        outputs = self.core.step().outputs
        for output in outputs:
            assert output.error is None
            assert output.request_id not in self.ended, "an ended request has no further output"
            for delta in output.deltas:
                self.tokens.setdefault(output.request_id, []).extend(delta.token_ids)
            if output.finished:
                self.ended[output.request_id] = output.deltas[-1].finish_reason if output.deltas else None
        check_scheduler(self.core.scheduler)
        return outputs

    def finish(self) -> dict[str, list[int]]:
        while self.core.has_unfinished():
            self.step()
        return self.tokens

    def wait_complete(self) -> None:
        for _ in range(200):
            if self.core.call("pause_is_complete"):
                return
            self.step()
        raise AssertionError("the pause is never complete")


def started(num_steps: int, **settings: Any) -> Reader:
    reader = Reader(make_core(**settings))
    reader.core.add_requests(requests())
    for _ in range(num_steps):
        reader.step()
    return reader


def expected(**settings: Any) -> dict[str, list[int]]:
    return started(0, **settings).finish()


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frozen_requests_go_on_with_the_same_tokens(settings: dict[str, Any], clear_cache: bool) -> None:
    for num_steps in (0, 1, 4, 9):
        reader = started(num_steps, **settings)
        core: Any = reader.core
        for _ in range(2):
            core.call("pause", "keep", clear_cache)
            reader.wait_complete()
            num_before, running = len(core.executor.steps), list(core.scheduler.running)
            assert reader.step() == []
            assert core.is_waiting, "it would ask for the next step without end"
            assert len(core.executor.steps) == num_before
            assert running == ([] if clear_cache else running)
            core.add_requests([make_request(f"late{num_before}", [5, 5, 5], max_tokens=3)])
            assert reader.step() == []
            assert core.call("is_paused")
            core.call("resume")
            assert not core.call("is_paused")
            reader.step()
        found = reader.finish()
        assert {name: each for name, each in found.items() if name[0] == "r"} == expected(**settings)
        assert sum(len(each) == 3 for each in found.values()) == 2


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_has_begun_ends_before_a_pause_that_waits_and_new_requests_wait(settings: dict[str, Any]) -> None:
    for num_steps in (1, 6):
        reader = started(num_steps, **settings)
        core = reader.core
        groups = core.scheduler.groups.values()
        begun = {each.request_id for each in groups if each.metrics.first_scheduled_time is not None}
        begun |= reader.ended.keys()
        assert core.call("pause", "wait", True) is False
        core.add_requests([make_request("late", [5, 5, 5], max_tokens=3)])
        reader.wait_complete()
        assert reader.ended.keys() == begun
        assert core.stats().num_waiting == len(PROMPTS) + 1 - len(begun)
        assert core.scheduler.block_manager.num_used_blocks == 0
        reader.step()
        assert core.is_waiting
        assert core.call("pause_is_complete")
        core.abort_requests(["late"])
        assert core.stats().num_waiting == len(PROMPTS) - len(begun)
        core.call("resume")
        assert reader.finish() == expected(**settings)


def test_aborted_requests_end_at_once_without_tokens_and_later_ones_wait() -> None:
    reader = started(5, max_num_seqs=4, depth=2)
    core: Any = reader.core
    assert core.call("pause", "abort", True) is False, "the outputs come with the next step"
    reader.wait_complete()
    assert reader.ended == {f"r{number}": None for number in range(6)}
    assert all(each == expected()[name][: len(each)] for name, each in reader.tokens.items())
    assert not core.has_unfinished()
    core.add_requests(again := requests())
    num_before = len(core.executor.steps)
    reader.step()
    assert (core.is_waiting, len(core.executor.steps)) == (True, num_before)
    assert [core.scheduler.block_manager.num_cached_tokens(each) for each in again] == [0] * 6, "it was forgotten"
    reader.tokens, reader.ended = {}, {}
    core.call("resume")
    assert reader.finish() == expected()


def test_a_pause_during_a_sleep_waits_for_nothing_that_sleeps() -> None:
    reader = started(4)
    core = reader.core
    core.call("sleep")
    core.call("pause", "wait", True)
    reader.wait_complete()
    assert not reader.ended, "those that had begun have no weights to go on with"
    core.call("wake_up")
    assert reader.finish() == expected()


def test_requests_that_arrive_during_a_pause_are_within_the_limits_of_the_queue() -> None:
    for mode in ("keep", "wait"):
        core = make_core(max_queued_requests=3, max_num_seqs=2)
        core.add_requests([make_request("first", [1, 2], max_tokens=4)])
        core.step()
        core.call("pause", mode, False)
        for number in range(8):
            core.add_requests([make_request(f"r{number}", [1, 2, number], max_tokens=2)])
            core.step()
        refused = 8 - core.stats().num_waiting
        assert 3 <= refused <= 5
        core.call("resume")
        while core.has_unfinished():
            core.step()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_running_requests_are_computed_again_when_the_cache_is_forgotten(settings: dict[str, Any]) -> None:
    for num_steps in (1, 3, 8):
        reader = started(num_steps, **settings)
        core, manager = reader.core, reader.core.scheduler.block_manager
        assert not core.call("reset_prefix_cache"), "requests run"
        assert core.call("reset_prefix_cache", True)
        assert manager.num_used_blocks == core.stats().num_swapped == 0
        assert [manager.num_cached_tokens(each) for each in requests()] == [0] * len(PROMPTS)
        check_scheduler(reader.core.scheduler)
        assert reader.finish() == expected(**settings)
        assert core.stats().num_preemptions > 0


def test_a_sleep_takes_the_place_of_a_pause_and_a_call_of_wake_up_ends_one() -> None:
    core = make_core()
    core.call("pause", "keep", True)
    core.call("sleep")
    assert (core.call("is_paused"), core.call("is_sleeping")) == (False, True)
    core.call("wake_up")
    core.call("pause", "keep", True)
    core.call("wake_up")
    assert not core.call("is_paused")
    core.call("pause", "keep", True)
    core.add_requests(requests())
    assert core.drop_requests() == len(PROMPTS)
    assert not core.call("is_paused"), "the next front knows of none"
    with pytest.raises(InvalidRequest, match="mode is 'drain', must be abort, wait or keep"):
        core.call("pause", "drain", True)
    assert not core.call("is_paused")


# ---- through a front ----


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BACK_OFF_S", 0.001)


def count_steps(cores: Fleet) -> int:
    return sum(each.scheduler.stats().num_steps for its in cores.cores.values() for each in its)


@pytest.mark.anyio
@pytest.mark.parametrize("disturb", ["nothing", "death", "drain"])
@pytest.mark.parametrize(("num_prefills", "count"), [(0, 1), (0, 2), (1, 1)])
async def test_streams_of_a_fleet_go_on_after_a_pause_whatever_happens_meanwhile(
    tmp_path: Path, num_prefills: int, count: int, disturb: str
) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core(), count, num_prefills=num_prefills) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(24)]
        await steps(llm, 6)
        await llm.pause_generation(mode="keep", clear_cache=disturb == "nothing")
        assert await llm.is_paused()
        reading += [asyncio.create_task(whole(llm, number)) for number in range(24, 32)]
        if disturb == "death":
            kill(llm)
            await eventually(lambda: llm.stats.num_restarts == 1)
        elif disturb == "drain":
            await llm.drain(0)
            await eventually(lambda: len(cores.cores[0]) == 2 and llm._client._replicas[0].is_ready)
        assert all([await each.client.call("is_paused") for each in llm._client._replicas])
        await eventually(lambda: all(each.stats.num_paused == 1 for each in llm.replicas))
        num_steps = count_steps(cores)
        await asyncio.sleep(0.05)
        assert count_steps(cores) == num_steps
        assert not all(each.done() for each in reading)
        await llm.check_health()
        await llm.resume_generation()
        assert await asyncio.gather(*reading) == expected
        assert not await llm.is_paused()
        await eventually(lambda: not llm.stats.num_paused)


@pytest.mark.anyio
async def test_metrics_show_pauses_and_sleeps_of_cores_that_have_no_requests(tmp_path: Path) -> None:
    def shown(llm: AsyncLLM) -> list[float]:
        names = ("octavo:cores_paused", "octavo:cores_sleeping")
        return [llm.metrics.registry.get_sample_value(name, {"model_name": "fake"}) or 0.0 for name in names]

    async with fleet(tmp_path, real_core()) as (llm, cores):
        [core] = cores.cores[0]
        core.sleep._is_allowed = True
        await llm.pause_generation(mode="wait")
        await eventually(lambda: shown(llm) == [1.0, 0.0])
        await llm.sleep()
        await eventually(lambda: shown(llm) == [0.0, 1.0])
        await llm.wake_up()
        await eventually(lambda: shown(llm) == [0.0, 0.0])
        await llm.pause_generation()
        await llm.resume_generation()
        await eventually(lambda: shown(llm) == [0.0, 0.0])


@pytest.mark.anyio
@pytest.mark.parametrize(("num_prefills", "count"), [(0, 2), (1, 1)])
async def test_an_aborting_pause_ends_every_open_request(tmp_path: Path, num_prefills: int, count: int) -> None:
    async def reasons(number: int) -> list[str | None]:
        params = SamplingParams(max_tokens=400, seed=number, ignore_eos=True)
        async for output in llm.generate([number + 1] * 20, params):
            assert output.error is None
            last = output
        return [each.finish_reason for each in last.outputs]

    async with fleet(tmp_path, real_core(max_num_seqs=4), count, num_prefills=num_prefills) as (llm, _):
        reading = [asyncio.create_task(reasons(number)) for number in range(20)]
        await steps(llm, 8)
        await llm.pause_generation()
        assert await asyncio.wait_for(asyncio.gather(*reading), 20) == [["abort"]] * 20
        client = llm._client
        await eventually(lambda: not any(each.num_open for each in client._replicas))
        assert client._dispatch.entries == {}
        await llm.resume_generation()
        assert await reasons(1) == ["length"]


@pytest.mark.anyio
async def test_a_pause_that_waits_returns_when_all_that_ran_has_ended(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core(max_num_seqs=4), 2) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 3)
        waiting = asyncio.create_task(llm.pause_generation(mode="wait", clear_cache=False))
        await eventually(lambda: all(each[-1].pause.is_on for each in cores.cores.values()))
        kill(llm)  # what ran in it comes again, and ends too
        await waiting
        assert all(
            not each[-1].scheduler.has_begun or each[-1].scheduler.holding == "all" for each in cores.cores.values()
        )
        await eventually(lambda: any(each.done() for each in reading))  # their outputs are there
        assert not all(each.done() for each in reading)
        assert llm.stats.num_running == 0
        await llm.resume_generation()
        assert await asyncio.gather(*reading) == expected


@pytest.mark.anyio
async def test_a_pause_that_waits_ends_when_another_call_resumes(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core()) as (llm, _):
        reading = asyncio.create_task(whole(llm, 1))
        await steps(llm, 2)
        waiting = asyncio.create_task(llm.pause_generation(mode="wait"))
        await eventually(lambda: not waiting.done())
        await llm.resume_generation()
        await asyncio.wait_for(waiting, 20)
        await reading
        with pytest.raises(InvalidRequest, match="mode is 'stop'"):
            await llm.pause_generation(mode="stop")


@pytest.mark.parametrize("depth", [1, 3])
def test_steps_in_flight_keep_the_label_of_their_weights(depth: int) -> None:
    reader = started(4, depth=depth)
    reader.core.call("set_weight_version", "2")
    versions: dict[str, list[str]] = {}
    while reader.core.has_unfinished():
        for each in reader.step():
            versions.setdefault(each.request_id, []).extend(each.weight_version for _ in each.deltas)
    assert len(versions) == 6
    # with one step in flight the next step draws with the new label; with more, those that ran keep theirs
    assert {each[0] for each in versions.values()} == {"2" if depth == 1 else None}
    assert {each[-1] for each in versions.values()} == {reader.core.call("get_weight_version")} == {"2"}


@pytest.mark.anyio
async def test_several_servers_share_a_label_which_outlives_a_core(tmp_path: Path) -> None:
    async with served(tmp_path, real_core(), 2) as made:
        first, second = made.servers
        assert await first.get_weight_version() == "default"
        await first.update_weight_version("3")
        made.replicas[0].client.kill("killed")
        await eventually(lambda: second.stats.num_restarts == 1)
        assert await second.get_weight_version() == "3"
        await second.finish_weight_update()
        await second.finish_weight_update("4")
        assert await first.get_weight_version() == "4"
        outputs = [each async for each in first.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=3))]
        assert outputs[-1].outputs[0].weight_versions == [WeightVersionSpan("4", 0, 3)]
        for label in ("", "x" * 257):
            with pytest.raises(InvalidRequest, match="new_version (has|is)"):
                await first.update_weight_version(label)


@pytest.mark.anyio
@pytest.mark.parametrize("count", [1, 2])
async def test_several_servers_share_a_pause(tmp_path: Path, count: int) -> None:
    expected = await undisturbed(tmp_path)
    async with served(tmp_path, real_core(), count) as made:
        first, second = made.servers
        reading = [asyncio.create_task(whole(made.servers[number % 2], number)) for number in range(32)]
        await steps(first, 6)
        await first.pause_generation(mode="keep")
        assert await second.is_paused()
        made.replicas[0].client.kill("killed")
        await eventually(lambda: second.stats.num_restarts == 1)
        assert not all(each.done() for each in reading)
        await second.resume_generation()
        assert await asyncio.gather(*reading) == expected
        reading = [asyncio.create_task(whole(made.servers[number % 2], number)) for number in range(32)]
        await steps(first, 6)
        await second.pause_generation()
        ended = await asyncio.wait_for(asyncio.gather(*reading), 20)
        reasons = {each.finish_reason for sequences, _ in ended for each in sequences.values()}
        assert "abort" in reasons
        assert not made.hub._open
        assert made.client._dispatch.entries == {}


async def kill_while_many_run(llm: AsyncLLM, cores: Fleet) -> None:
    """Kill the first core, whose requests that have run wait for another one or for their turn, and let none start."""
    first, dispatch = llm._client._replicas[0], llm._client._dispatch
    await eventually(lambda: sum(each.has_run and each.replica is first for each in dispatch.entries.values()) >= 8)
    cores.may_start.clear()
    kill(llm)
    await eventually(lambda: bool(dispatch.suspects))


@pytest.mark.anyio
async def test_an_aborting_pause_ends_requests_that_wait_for_a_core(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), 2) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await kill_while_many_run(llm, cores)
        await llm.pause_generation()
        await asyncio.wait_for(asyncio.gather(*reading), 20)
        assert llm._client._dispatch.entries == {}
        cores.may_start.set()
        await eventually(lambda: llm.stats.num_restarts == 1)
        assert await llm.is_paused()
        assert await llm._client._replicas[0].client.call("is_paused")


@pytest.mark.anyio
@pytest.mark.parametrize("follows", ["pause", "resume"])
async def test_what_follows_an_aborting_pause_forgets_none_that_it_ends(tmp_path: Path, follows: str) -> None:
    """A core is started again, and requests that wait for it end when the pause is complete, or with what follows."""
    async with fleet(tmp_path, real_core(), 2) as (llm, cores):
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await kill_while_many_run(llm, cores)
        entries = llm._client._dispatch.entries.values()
        waiting = [list(each.request.prompt_token_ids) for each in entries if each.replica is None]
        assert await llm.call("pause", "abort", True) is False, "the outputs of the other core are under way"
        if follows == "pause":
            await llm.pause_generation(mode="keep")
        else:
            await llm.resume_generation()
        ended = await asyncio.wait_for(asyncio.gather(*reading), 20)
        of_waiting = [
            sequences for prompt, (sequences, _) in zip(READ_PROMPTS, ended, strict=True) if prompt in waiting
        ]
        num_aborted = sum("abort" in {each.finish_reason for each in sequences.values()} for sequences in of_waiting)
        # one of them may have been sent to the other core, and have ended there, before the pause
        assert num_aborted >= len(waiting) - 1 > 0
        assert llm._client._dispatch.entries == {}
        cores.may_start.set()
        await eventually(lambda: llm.stats.num_restarts == 1)


@pytest.mark.anyio
async def test_a_core_that_is_added_during_a_pause_is_paused(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core()) as (llm, cores):
        await llm.pause_generation(mode="keep")
        llm._client.add(added := Replica(1, await cores.start(1), cores.start))
        reading = [asyncio.create_task(whole(llm, number)) for number in range(4)]
        await eventually(lambda: added.num_open > 0)
        assert await added.client.call("is_paused")
        assert count_steps(cores) == 0
        await llm.resume_generation()
        await asyncio.gather(*reading)


@pytest.mark.anyio
async def test_a_sleep_that_is_refused_ends_no_request_and_leaves_no_pause(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core()) as (llm, cores):
        [core] = cores.cores[0]
        core.sleep._is_allowed = False
        reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
        await steps(llm, 3)
        with pytest.raises(RequestFailed, match="start it with enable_sleep_mode"):
            await llm.sleep(mode="abort")
        assert not await llm.is_paused()
        await llm.sleep(level=0, mode="keep")
        assert (await llm.is_paused(), await llm.is_sleeping()) == (True, False)
        await llm.wake_up(["scheduling"])
        assert await asyncio.gather(*reading) == expected
        for level, mode in ((3, "keep"), (1, "stop"), (0, "stop")):
            with pytest.raises(InvalidRequest):
                await llm.sleep(level, mode)
        model = dataclasses.replace(llm.config.model, enable_sleep_mode=True)
        llm.config = msgspec.structs.replace(llm.config, model=model)
        with pytest.raises(RequestFailed, match="start it with enable_sleep_mode"):
            await llm.sleep(mode="abort")
        assert not await llm.is_paused()
        core.sleep._is_allowed = True
        reading = [asyncio.create_task(whole(llm, number)) for number in range(4)]
        await steps(llm, 3)
        await llm.sleep(mode="wait")
        assert (await llm.is_paused(), await llm.is_sleeping()) == (False, True)
        assert core.stats().num_preemptions == 0, "what had begun has ended"
        await llm.wake_up()
        assert await asyncio.gather(*reading) == expected[:4]
        assert await whole(llm, 5) == expected[5]
