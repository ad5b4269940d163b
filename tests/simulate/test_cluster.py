"""Replicas, routers and the loop of events, and that processes change nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from octavo.engine.cores.router import ROUTERS
from octavo.errors import ConfigError
from octavo.simulate.cost_model import Fitted
from octavo.simulate.link import Disaggregation
from octavo.simulate.outcome import Outcome
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate
from tests.simulate.parts import make_costs, make_settings


def run(trace: Trace, num_replicas: int = 1, router: str = "round-robin", costs: Fitted | None = None) -> Outcome:
    simulation = Simulation(
        settings=make_settings(num_blocks=200, max_num_batched_tokens=64),
        cost_model=costs or make_costs(),
        num_replicas=num_replicas,
        router=router,
    )
    return simulate(trace, simulation)


def busy_trace(num_requests: int = 60, **values: object) -> Trace:
    workload = Workload(num_requests=num_requests, request_rate=0.5, input_len=20, output_len=8, max_len=60, **values)  # type: ignore[arg-type]
    return Trace(generate(workload, seed=1))


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    trace = Trace([TraceRequest(arrival_s=4.0, num_prompt_tokens=10, output_len=3)])
    (record,) = run(trace, costs=make_costs(step_s=1.0, prefill_token_s=0.5)).records
    assert (record.arrival_s, record.first_scheduled_s, record.first_token_s, record.finished_s) == (4, 4, 10, 12)
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_preemptions) == (10, 3, 0)


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    trace = Trace(
        [
            TraceRequest(num_prompt_tokens=4, output_len=2),
            TraceRequest(arrival_s=0.5, num_prompt_tokens=4, output_len=1),
        ]
    )
    first, second = run(trace).records
    assert (first.finished_s, second.first_scheduled_s, second.finished_s) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_ends_once_with_all_its_tokens(router: str) -> None:
    trace = busy_trace(n=2)
    outcome = run(trace, num_replicas=3, router=router)
    assert [record.number for record in outcome.records] == list(range(60))
    assert [record.num_output_tokens for record in outcome.records] == [
        sum(each.output_lens) for each in trace.requests
    ]
    for record in outcome.records:
        assert record.error is None
        assert record.first_scheduled_s is not None
        assert record.first_token_s is not None
        assert record.arrival_s <= record.first_scheduled_s < record.first_token_s <= record.finished_s
    assert {record.replica for record in outcome.records} == {0, 1, 2}


def test_a_turn_arrives_when_the_one_before_has_been_answered() -> None:
    trace = busy_trace(num_requests=30, turns=3, think_s=5.0)
    records = run(trace, num_replicas=2).records
    later = [number for number, each in enumerate(trace.requests) if each.follows is not None]
    assert later
    for number in later:
        before = trace.ids.index(trace.requests[number].follows or "")
        assert records[number].arrival_s == records[before].finished_s + trace.requests[number].arrival_s


def test_a_request_that_never_fits_is_refused_and_its_followers_go_on() -> None:
    trace = Trace(
        [
            TraceRequest(request_id="a", num_prompt_tokens=5000, output_len=4),
            TraceRequest(follows="a", num_prompt_tokens=5, output_len=4),
        ]
    )
    first, second = run(trace).records
    assert first.error is not None
    assert "the request needs 1251 KV blocks" in first.error
    assert (first.num_output_tokens, second.num_output_tokens) == (0, 4)


def test_the_progress_of_a_simulation_is_reported() -> None:
    shares: list[float] = []
    simulation = Simulation(settings=make_settings(), cost_model=make_costs())
    simulate(busy_trace(num_requests=10), simulation, progress=shares.append)
    assert shares == sorted(shares)
    assert {shares[0], shares[-1]} == {0.0, 1.0}


def test_round_robin_deals_out_in_turn() -> None:
    outcome = run(busy_trace(), num_replicas=4)
    by_arrival = sorted(outcome.records, key=lambda record: record.arrival_s)
    assert [record.replica for record in by_arrival] == [i % 4 for i in range(60)]


def test_the_least_loaded_replica_gets_the_next_request() -> None:
    long = [TraceRequest(num_prompt_tokens=4, output_len=100)]
    short = [TraceRequest(arrival_s=1.0 + i, num_prompt_tokens=4, output_len=5) for i in range(3)]
    records = run(Trace(long + short), num_replicas=2, router="least-loaded").records
    assert [record.replica for record in records] == [0, 1, 0, 1]


def test_prefix_aware_routing_finds_more_in_the_caches() -> None:
    trace = busy_trace(num_requests=80, shared_prefix_len=32, num_shared_prefixes=8)

    def cached(router: str) -> int:
        return sum(record.num_cached_tokens for record in run(trace, num_replicas=4, router=router).records)

    assert cached("prefix-aware") > 1.3 * cached("round-robin") > 0


def test_a_prefix_that_everybody_has_does_not_pile_up_on_one_replica() -> None:
    trace = busy_trace(num_requests=80, shared_prefix_len=32)
    share = Counter(record.replica for record in run(trace, num_replicas=4, router="prefix-aware").records)
    assert max(share.values()) < 80 * 0.7


def test_separate_pools_pay_for_prompt_transfer_and_output_once() -> None:
    trace = Trace([TraceRequest(num_prompt_tokens=10, output_len=4), TraceRequest(num_prompt_tokens=10, output_len=1)])
    simulation = Simulation(
        settings=make_settings(max_num_batched_tokens=64),
        cost_model=make_costs(step_s=1.0, prefill_token_s=0.5, kv_bytes_per_token=8.0),
        num_replicas=2,
        disaggregation=Disaggregation(num_prefill=1, bytes_per_s=40.0, latency_s=3.0, min_tokens=1),
    )
    outcome = simulate(trace, simulation)
    long, short = outcome.records
    # both prompts in one step; three blocks of 32 bytes travel for 3 + 2.4 seconds; the last token of the prompt is
    # computed again, and draws the first token again; three more tokens
    assert (short.finished_s, short.replica) == (11.0, 0)
    assert (long.first_token_s, long.finished_s, long.replica) == (11.0, pytest.approx(20.4), 1)
    assert long.num_output_tokens == 4
    assert outcome.totals.num_steps == 1 + 4


def test_what_a_replica_sends_goes_one_after_the_other() -> None:
    trace = Trace([TraceRequest(num_prompt_tokens=10, output_len=2) for _ in range(3)])
    simulation = Simulation(
        settings=make_settings(max_num_batched_tokens=64),
        cost_model=make_costs(step_s=1.0, kv_bytes_per_token=8.0),
        num_replicas=2,
        disaggregation=Disaggregation(num_prefill=1, bytes_per_s=16.0, latency_s=0.0, min_tokens=1),
    )
    # three blocks of 32 bytes take six seconds; the two steps that follow take one each
    assert [record.finished_s for record in simulate(trace, simulation).records] == [9.0, 15.0, 21.0]


@pytest.mark.parametrize("kind", [{"n": 3}, {"n": 1, "best_of": 3}, {"n": 3, "use_beam_search": True}])
def test_several_sequences_part_where_they_are_decoded(kind: dict[str, Any]) -> None:
    trace = Trace([TraceRequest(num_prompt_tokens=10, output_len=5, **kind)])
    simulation = Simulation(
        settings=make_settings(),
        cost_model=make_costs(step_s=1.0, prefill_token_s=0.5),
        num_replicas=3,
        disaggregation=Disaggregation(num_prefill=1, bytes_per_s=1e9, latency_s=2.0, min_tokens=1),
    )
    (record,) = simulate(trace, simulation).records
    # beams are not begun with what the prompt's replica draws
    assert record.first_token_s == pytest.approx(9.0 if "use_beam_search" in kind else 6.0)
    assert (record.num_output_tokens, record.replica) == (15, 1)
    # the prompt's ten tokens are paid for once
    assert record.finished_s == pytest.approx(6.0 + 2.0 + 5.0)


def test_a_later_turn_finds_prompt_and_produced_tokens_of_the_one_before() -> None:
    turns = [
        TraceRequest(request_id="a", num_prompt_tokens=9, output_len=6, conversation="c"),
        TraceRequest(request_id="b", num_prompt_tokens=22, output_len=3, conversation="c", follows="a", arrival_s=2.0),
        TraceRequest(num_prompt_tokens=25, output_len=1, conversation="c", follows="b"),
    ]
    first, second, third = run(Trace(turns)).records
    assert second.arrival_s == first.finished_s + 2.0
    # the last token of an answer was drawn and never computed; what is found are full blocks of four
    assert [each.num_cached_tokens for each in (first, second, third)] == [0, 12, 24]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"disaggregation": Disaggregation(num_prefill=2)}, "disaggregated is 2, must leave at least one of 2 repl"),
        ({"num_replicas": 0}, "replicas is 0, must be at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(values: dict[str, object], message: str) -> None:
    simulation = Simulation(settings=make_settings(), cost_model=make_costs(), num_replicas=2)
    with pytest.raises(ConfigError, match=message):
        simulate(busy_trace(), msgspec.structs.replace(simulation, **values))


def test_many_samples_are_thinned_out_evenly() -> None:
    trace = Trace([TraceRequest(num_prompt_tokens=4, output_len=200)])
    samples = run(trace).samples
    assert 128 < len(samples) <= 512
    gaps = {round(b.time_s - a.time_s, 6) for a, b in itertools.pairwise(samples)}
    assert len(gaps) == 1
    assert samples[0].time_s == 0.0
    assert max(sample.num_running for sample in samples) == 1


def test_processes_change_nothing_and_tell_how_far_they_are() -> None:
    trace, shares = busy_trace(num_requests=90), list[float]()
    simulation = Simulation(settings=make_settings(), cost_model=make_costs(), num_replicas=5)
    alone, shared = simulate(trace, simulation), simulate(trace, simulation, 2, shares.append)
    assert len(set(shares)) > 30
    assert (sorted(shares), shares[-1]) == (shares, 1.0)
    assert shared.records == alone.records
    assert (shared.totals.num_steps, shared.num_replicas) == (alone.totals.num_steps, alone.num_replicas)
    by_time = {sample.time_s: sample for sample in alone.samples}
    for sample in shared.samples:
        other = by_time[sample.time_s]
        assert (sample.num_running, sample.num_waiting) == (other.num_running, other.num_waiting)
        assert sample.kv_usage == pytest.approx(other.kv_usage)


def test_the_same_simulation_twice_is_the_same() -> None:
    trace = busy_trace(arrivals="gamma", turns=2)
    assert run(trace, 3, "prefix-aware").records == run(trace, 3, "prefix-aware").records
