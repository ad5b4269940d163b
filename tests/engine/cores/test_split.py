"""Prefill and decode in different cores: every request ends as on one core, whatever comes first or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.messages import (
    AbortRequests,
    AddRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    SchedulerStats,
    SequenceDelta,
    StepOutputs,
    StopSequence,
)
from octavo.core.outputs import RequestError, RequestMetrics
from octavo.core.resume import ResumedSequence
from octavo.engine.cores import replica as replica_module
from octavo.engine.cores.dispatch import Dispatch
from octavo.engine.cores.replica import Replica
from octavo.engine.cores.router import LeastLoaded
from octavo.engine.cores.split import FIRST_GUESS, Split, SplitRates
from octavo.errors import EngineDeadError, InvalidRequest
from tests.engine.cores.test_replicas import eventually, real_core, steps, undisturbed, whole
from tests.fakes.core import core_ready, token_logprobs
from tests.fakes.engine import make_request
from tests.fakes.fleet import fleet, kill

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BACK_OFF_S", 0.001)


@pytest.mark.parametrize(("num_prefills", "count"), [(1, 1), (2, 2)])
async def test_streams_of_split_requests_are_those_of_one_core(tmp_path: Path, num_prefills: int, count: int) -> None:
    expected = await undisturbed(tmp_path)
    async with fleet(tmp_path, real_core(), count, num_prefills=num_prefills) as (llm, _):
        assert await asyncio.gather(*(whole(llm, number) for number in range(32))) == expected
        assert (llm.stats.num_handovers, llm.stats.num_handover_mismatches) == (32, 0)
        client = llm._client
        await eventually(lambda: not any(each.num_open for each in client._replicas))
        assert (client._split._handovers, client._dispatch.entries) == ({}, {})  # type: ignore[union-attr]


@pytest.mark.parametrize("dies", [0, 1], ids=["prefill", "decode"])
async def test_streams_end_alike_whenever_a_core_is_killed(tmp_path: Path, dies: int) -> None:
    expected = await undisturbed(tmp_path)
    for num_steps in (2, 12):
        async with fleet(tmp_path, real_core(), num_prefills=1) as (llm, _):
            reading = [asyncio.create_task(whole(llm, number)) for number in range(32)]
            await steps(llm, num_steps)
            kill(llm, dies)
            assert await asyncio.gather(*reading) == expected
            assert (llm.stats.num_restarts, llm.stats.num_handover_mismatches) == (1, 0)


async def test_prefill_core_that_is_drained_or_given_up_leaves_the_others(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), num_prefills=1, max_restarts=0) as (llm, _):
        expected = await whole(llm, 3)
        for replica in (0, 1):
            reading = asyncio.create_task(whole(llm, 3))
            await steps(llm, 2)
            await llm.drain(replica)
            assert await reading == expected
            await eventually(lambda: llm.stats.num_ready == 2)
        kill(llm, 0)
        await eventually(lambda: llm.stats.num_ready == 1)
        assert await whole(llm, 3) == expected
        await llm.check_health()


async def test_without_a_decode_core_the_engine_is_dead(tmp_path: Path) -> None:
    async with fleet(tmp_path, real_core(), num_prefills=1, max_restarts=0) as (llm, _):
        with pytest.raises(InvalidRequest, match="replica 1 is the only one"):
            await llm.drain(1, stop=True)
        kill(llm, 1, "the last one")
        assert "the last one" in str(await llm.wait_dead())
        with pytest.raises(EngineDeadError):
            await llm.check_health()


class Client:
    """Keeps what a core is sent."""

    def __init__(self, number: int) -> None:
        self.ready = core_ready(transfer=f"/tmp/core{number}")
        self.sent: list[Any] = []
        self.send = self.sent.append


class Front:
    """A dispatch with prefill and decode replicas, and no cores."""

    def __init__(self, num_prefills: int = 1, count: int = 1, rates: SplitRates | None = None) -> None:
        roles = ["prefill"] * num_prefills + ["decode"] * count
        self.replicas = [Replica(number, Client(number), role=role) for number, role in enumerate(roles)]  # type: ignore[arg-type]
        prefills, decodes = self.replicas[:num_prefills], self.replicas[num_prefills:]
        self.dispatch = Dispatch(decodes, LeastLoaded())
        self.resumed: dict[str, EngineCoreRequest | None] = {}
        self.dispatch.to_resume = self.resumed.get
        self.split = self.dispatch.split = Split(
            prefills, self.dispatch, LeastLoaded(), block_size=4, rates=rates or SplitRates(8)
        )

    def add(self, *requests: EngineCoreRequest) -> None:
        self.resumed.update((each.request_id, each) for each in requests)
        self.dispatch.add(requests)

    def step(self, number: int, *outputs: EngineCoreOutput, began: Sequence[str] = ()) -> list[EngineCoreOutput]:
        """Take a step of a core; return what the client gets of it."""
        step = StepOutputs(outputs=list(outputs), stats=SchedulerStats(), began=list(began))
        self.split.take(self.replicas[number], step)
        self.dispatch.note(step)
        return step.outputs

    def lose(self, number: int) -> None:
        self.replicas[number].is_ready = False
        self.dispatch.take_back(self.replicas[number])
        self.dispatch.wait_first(self.split.lose(self.replicas[number]))
        self.dispatch.send_waiting()

    def got(self, number: int) -> list[Any]:
        """What a core was sent since the last call: requests, ids of aborted ones, and sequences to stop."""
        client: Any = self.replicas[number].client
        found: list[Any] = []
        for message in client.sent:
            if isinstance(message, AddRequests):
                found += message.requests
            else:
                found += message.request_ids if isinstance(message, AbortRequests) else [message]
        client.sent.clear()
        return found

    @property
    def is_idle(self) -> bool:
        return not (any(each.num_open for each in self.replicas) or self.split._handovers or self.dispatch.entries)


def a_request(name: str = "r", num_tokens: int = 8, **params: Any) -> EngineCoreRequest:
    return make_request(name, range(num_tokens), **{"max_tokens": 5, "seed": 1} | params)


def of_prefill(*token_ids: int, ends: str = "length", error: RequestError | None = None) -> EngineCoreOutput:
    """The first tokens of all sequences of the request "r"."""
    metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=1.0, first_token_time=2.0, finished_time=2.0)
    deltas = [delta(index, token, ends=ends) for index, token in enumerate(token_ids)]
    return EngineCoreOutput(request_id="r", deltas=deltas, finished=True, metrics=metrics, error=error)


def of_decode(*deltas: SequenceDelta, finished: bool = False) -> EngineCoreOutput:
    metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=5.0, first_token_time=6.0)
    return EngineCoreOutput(request_id="r", deltas=list(deltas), finished=finished, metrics=metrics)


def delta(index: int, *token_ids: int, ends: str | None = None) -> SequenceDelta:
    logprobs = [token_logprobs(token_id, 2) for token_id in token_ids]
    return SequenceDelta(index=index, token_ids=list(token_ids), logprobs=logprobs, finish_reason=ends)


def tokens(outputs: Sequence[EngineCoreOutput]) -> list[Any]:
    """Index, tokens and end of each delta; True behind them when the request is over."""
    found: list[Any] = [(d.index, d.token_ids, d.finish_reason) for output in outputs for d in output.deltas]
    return found + [True for output in outputs if output.finished]


def test_prompt_is_computed_by_one_core_and_decoded_by_the_other() -> None:
    front = Front()
    front.add(a_request(min_tokens=3))
    [asked] = front.got(0)
    assert (asked.params.max_tokens, asked.params.min_tokens, asked.keep_s, asked.prefill) == (1, 1, 30.0, None)
    assert front.got(1) == []
    assert front.step(0, began=["r"]) == []
    [whole] = front.got(1)
    assert (whole.params.max_tokens, whole.prefill, whole.keep_s) == (5, "/tmp/core0", 0.0)
    assert whole.metrics is not None, "another core has accepted it"
    first = of_prefill(7)
    first.weight_version = "2"
    [output] = front.step(0, first)
    assert (tokens([output]), output.weight_version) == ([(0, [7], None)], "2")
    [output] = front.step(1, of_decode(delta(0, 7, 8)))
    assert tokens([output]) == [(0, [8], None)]
    assert output.metrics is not None
    assert (output.metrics.first_scheduled_time, output.metrics.first_token_time) == (1.0, 2.0)
    assert tokens(front.step(1, of_decode(delta(0, 9, ends="stop"), finished=True))) == [(0, [9], "stop"), True]
    assert front.is_idle


def test_first_tokens_that_come_second_are_dropped_whichever_core_is_late() -> None:
    front = Front()
    front.add(a_request(n=2))
    front.step(0, began=["r"])
    assert tokens(front.step(1, of_decode(delta(0, 7)))) == [(0, [7], None)]
    assert tokens(front.step(0, of_prefill(7, 8))) == [(1, [8], None)]
    assert tokens(front.step(1, of_decode(delta(0, 9), delta(1, 8)))) == [(0, [9], None)]
    assert tokens(front.step(1, of_decode(delta(0, 8), delta(1, 8)))) == [(0, [8], None), (1, [8], None)]


@pytest.mark.parametrize("first", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("differs", ["token", "log-probability"])
def test_first_tokens_that_differ_end_the_request(first: int, differs: str, caplog: pytest.LogCaptureFixture) -> None:
    front = Front()
    front.add(a_request())
    front.step(0, began=["r"])
    front.got(1)
    mine, other = of_prefill(7), of_decode(delta(0, 7 + (differs == "token")))
    if differs == "log-probability":
        other.deltas[0].logprobs[0] = msgspec.structs.replace(other.deltas[0].logprobs[0], logprob=-0.50001)
    outputs = [(0, mine), (1, other)] if first == 0 else [(1, other), (0, mine)]
    assert len(tokens(front.step(*outputs[0]))) == 1
    [output] = front.step(*outputs[1])
    assert output.finished
    assert output.error is not None
    assert (output.error.code, output.error.is_client_error) == ("handover_mismatch", False)
    assert "token 7" in caplog.text
    assert front.got(1) == ["r"]
    assert front.is_idle
    front.add(a_request("same"))
    assert [each.request_id for each in front.got(0)][-1] == "same", "the next one is compared, too"
    replica = front.replicas[outputs[1][0]]
    replica.note(StepOutputs(outputs=[], stats=SchedulerStats()))
    assert replica.stats.num_handover_mismatches == 1


def test_sequences_that_end_with_their_first_token_need_no_decode_core() -> None:
    for params in ({}, {"max_tokens": 1}):
        front = Front()
        front.add(a_request(**params))
        front.step(0, began=["r"])
        front.got(1)
        ends = "length" if params else "stop"
        [output] = front.step(0, of_prefill(7, ends=ends))
        assert tokens([output]) == [(0, [7], ends), True]
        assert output.metrics is not None
        assert output.metrics.finished_time is not None
        assert front.got(1) == ["r"]
        assert front.is_idle


def test_one_of_several_sequences_that_ends_with_its_first_token() -> None:
    front = Front()
    front.add(a_request(n=2))
    front.step(0, began=["r"])
    first = of_prefill(7, 8)
    first.deltas[1].finish_reason = "stop"
    assert tokens(front.step(0, first)) == [(0, [7], None), (1, [8], "stop")]
    assert tokens(front.step(1, of_decode(delta(0, 7), delta(1, 8, ends="stop")))) == []
    assert tokens(front.step(1, of_decode(delta(0, 9, ends="length"), finished=True))) == [(0, [9], "length"), True]


def test_beams_come_from_the_decode_core_alone() -> None:
    front = Front()
    front.add(a_request(n=2, use_beam_search=True))
    [asked] = front.got(0)
    assert (asked.params.n, asked.params.use_beam_search, asked.params.max_tokens) == (1, False, 1)
    front.step(0, began=["r"])
    assert front.got(1)[0].params.use_beam_search
    assert front.step(0, of_prefill(7)) == []
    beams = of_decode(delta(0, 3, 4, ends="length"), delta(1, 3, 5, ends="length"), finished=True)
    assert tokens(front.step(1, beams)) == [(0, [3, 4], "length"), (1, [3, 5], "length"), True]
    assert front.is_idle


@pytest.mark.parametrize(
    "request_",
    [
        a_request(num_tokens=7),
        a_request(prompt_logprobs=1),
        msgspec.structs.replace(a_request(), resumed=(ResumedSequence(index=0, token_ids=[1]),)),
    ],
    ids=["short", "prompt_logprobs", "resumed"],
)
def test_some_requests_stay_on_the_decode_core(request_: EngineCoreRequest) -> None:
    front = Front()
    front.add(request_)
    assert front.got(0) == []
    assert front.got(1) == [request_]


def test_prompt_that_the_decode_core_has_stays_there() -> None:
    front = Front()
    front.add(a_request())
    front.add(a_request("same"))
    assert [each.request_id for each in front.got(0)] == ["r", "same"], "it is not there yet"
    front.step(0, began=["r"])
    front.step(0, of_prefill(7))
    front.step(1, of_decode(delta(0, 7)))
    front.add(a_request("again", num_tokens=12))
    front.add(a_request("longer", num_tokens=20))
    assert [each.request_id for each in front.got(0)] == ["longer"]
    front.split.forget()
    front.add(a_request("forgotten", num_tokens=12))
    assert [each.request_id for each in front.got(0)] == ["forgotten"]


def test_next_turn_of_a_conversation_stays_where_the_answer_was_decoded() -> None:
    front = Front()
    front.add(a_request())
    front.step(0, began=["r"])
    front.step(1, of_decode(delta(0, 7)))
    answer = list(range(100, 120))
    front.resumed["r"] = msgspec.structs.replace(a_request(), resumed=(ResumedSequence(index=0, token_ids=answer),))
    front.step(1, of_decode(delta(0, 9, ends="stop"), finished=True))
    front.got(0)
    front.add(msgspec.structs.replace(a_request("next"), prompt_token_ids=[*range(8), *answer, 1, 2, 3]))
    assert front.got(0) == []


def test_requests_of_one_batch_stay_together() -> None:
    front = Front()
    front.add(a_request("a"), a_request("b", num_tokens=3))
    assert [each.request_id for each in front.got(1)] == ["a", "b"]
    front.add(a_request("c", num_tokens=30), a_request("d", num_tokens=20))
    assert [each.request_id for each in front.got(0)] == ["c", "d"]


def test_prefill_core_that_dies_before_it_begins_is_replaced_by_another_or_by_the_decode_core() -> None:
    front = Front(num_prefills=2)
    front.add(a_request())
    front.got(0)
    front.lose(0)
    assert [each.request_id for each in front.got(1)] == ["r"]
    front.lose(1)
    [alone] = front.got(2)
    assert (alone.prefill, alone.params.max_tokens) == (None, 5)
    assert front.dispatch.entries["r"].num_deaths == 0
    assert tokens(front.step(2, of_decode(delta(0, 7, ends="stop"), finished=True))) == [(0, [7], "stop"), True]
    assert front.is_idle


def test_death_of_a_prefill_core_that_has_begun_counts_until_the_decode_core_has_a_token() -> None:
    front = Front()
    front.add(a_request())
    front.step(0, began=["r"])
    front.lose(0)
    assert len(front.got(1)) == 1
    assert front.dispatch.entries["r"].num_deaths == 1
    assert tokens(front.step(1, of_decode(delta(0, 7)))) == [(0, [7], None)]
    assert front.dispatch.entries["r"].num_deaths == 0


def test_request_that_both_cores_die_of_is_quarantined() -> None:
    front = Front()
    front.add(a_request())
    front.step(0, began=["r"])
    front.lose(0)
    front.step(1, began=["r"])
    assert [each.request_id for each in front.dispatch.take_back(front.replicas[1]).quarantined] == ["r"]


def test_decode_core_that_dies_before_a_token_is_replaced_and_fetches_again() -> None:
    front = Front(count=2)
    front.add(a_request())
    front.step(0, began=["r"])
    front.got(1)
    front.lose(1)
    assert front.got(2)[0].prefill == "/tmp/core0"
    assert tokens(front.step(0, of_prefill(7))) == [(0, [7], None)]
    assert tokens(front.step(2, of_decode(delta(0, 7, 8)))) == [(0, [8], None)]


def test_decode_core_that_dies_behind_the_first_token_is_resumed_without_the_prefill_core() -> None:
    front = Front(count=2)
    front.add(a_request())
    front.step(0, began=["r"])
    front.step(1, of_decode(delta(0, 7)))
    behind = msgspec.structs.replace(a_request(), resumed=(ResumedSequence(index=0, token_ids=[7]),))
    front.resumed["r"] = behind
    front.got(0)
    front.lose(1)
    assert front.got(0) == ["r"]
    assert front.got(2) == [behind]
    assert front.step(0, of_prefill(7)) == []
    assert tokens(front.step(2, of_decode(delta(0, 8)))) == [(0, [8], None)]


def test_without_a_decode_core_that_is_ready_the_request_waits_and_is_fetched_later() -> None:
    front = Front()
    front.add(a_request())
    front.lose(1)
    front.step(0, began=["r"])
    assert tokens(front.step(0, of_prefill(7))) == [(0, [7], None)]
    assert (front.got(1), front.dispatch.num_waiting()) == ([], 1)
    front.replicas[1].is_ready = True
    front.dispatch.send_waiting()
    assert front.got(1)[0].prefill == "/tmp/core0"
    assert front.step(1, of_decode(delta(0, 7)))[0].deltas == []


def test_refused_by_the_prefill_core_the_decode_core_decides() -> None:
    front = Front()
    front.add(a_request())
    front.step(0, of_prefill(error=RequestError("too many wait")))
    assert (front.got(1)[0].prefill, front.got(1)) == (None, [])
    failure = EngineCoreOutput(request_id="r", deltas=[], finished=True, error=RequestError("too many wait"))
    assert front.step(1, failure) == [failure]
    assert front.is_idle


@pytest.mark.parametrize("when", ["waits", "began", "first token"])
def test_client_that_has_gone_is_forgotten_by_both_cores(when: str) -> None:
    front = Front()
    front.add(a_request())
    if when != "waits":
        front.step(0, began=["r"])
    if when == "first token":
        front.step(0, of_prefill(7))
    front.got(0)
    replica = front.dispatch.end("r")
    assert replica is (None if when == "waits" else front.replicas[1])
    assert front.got(0) == ([] if when == "first token" else ["r"])
    assert front.is_idle
    assert front.step(0, of_prefill(7)) == []


def test_sequence_that_stops_at_its_first_token_is_stopped_once_the_decode_core_has_it() -> None:
    front = Front()
    front.add(a_request(n=2))
    stop = StopSequence("r", 1)
    assert not front.split.holds(StopSequence("other", 0))
    front.step(0, began=["r"])
    front.step(0, of_prefill(7, 8))
    front.got(1)
    assert front.split.holds(stop)
    assert front.got(1) == []
    front.step(1, of_decode(delta(0, 7), delta(1, 8)))
    assert front.got(1) == [stop]
    assert not front.split.holds(stop)


def test_threshold_follows_from_measured_speeds_within_limits() -> None:
    rates = SplitRates(most_tokens=1000)
    assert rates.min_tokens == FIRST_GUESS
    rates.note_prefill(500, 0.5)
    rates.note_handover(0.1)
    assert rates.min_tokens == 100
    rates.note_handover(0.2)
    assert rates.min_tokens == 110
    rates.note_handover(0.0)
    assert rates.min_tokens == 1
    for _ in range(100):
        rates.note_handover(100.0)
    assert rates.min_tokens == 1000
    assert SplitRates(30, most_tokens=10).min_tokens == 30
    given = SplitRates(tokens_per_s=1000.0)
    given.note_prefill(1, 1.0)
    given.note_handover(0.05)
    assert given.min_tokens == 50
