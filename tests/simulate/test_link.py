"""Links in simulated time: what is sent when, and that requests find it through the scheduler's own connector."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest

from octavo.engine.cores.router import RoundRobin
from octavo.engine.cores.split import Split, SplitRates
from octavo.kv_cache.block_pool import Content
from octavo.kv_transfer.connector import Fetch
from octavo.simulate.cluster import Cluster
from octavo.simulate.link import Disaggregation, Link
from octavo.simulate.replica import SimulatedReplica
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate
from tests.fakes.accounting import check_scheduler
from tests.simulate.parts import make_costs, make_settings

DIGESTS = [b"1", b"2", b"3", b"4"]


class Transfers:
    """A link of 8 bytes a second that sends blocks of 8 bytes, with half a second of latency, and what has arrived."""

    def __init__(self, num_layers: int = 1) -> None:
        self.link = Link(Disaggregation(num_prefill=1, bytes_per_s=8.0, latency_s=0.5), 8.0, num_layers)
        self.done: list[tuple[str, float, str]] = []

    def compute(self, *digests: bytes, begins_at: float = 0.0, ends_at: float = 0.0) -> None:
        for digest in digests:
            self.link.stored(0, 1, Content(digest, b"parent", (1,)))
        self.link.note_step(begins_at, ends_at)

    def fetch(self, name: str, digests: list[bytes], now: float = 0.0, blocks: list[int] | None = None) -> None:
        fetch = Fetch(1, name, digests, [blocks or [1] * len(digests)])
        self.link.fetch(fetch, now, lambda at, error: self.done.append((name, at, error)))


def test_what_is_there_is_sent_one_after_the_other_and_null_blocks_are_not() -> None:
    transfers = Transfers()
    transfers.compute(*DIGESTS)
    transfers.fetch("a", DIGESTS[:2], now=1.0)
    transfers.fetch("b", DIGESTS, now=1.0, blocks=[0, 0, 0, 7])
    transfers.fetch("c", DIGESTS[:1], now=9.0)
    transfers.fetch("nothing", DIGESTS[:1], now=20.0, blocks=[0])
    assert transfers.done == [("a", 3.5, ""), ("b", 4.5, ""), ("c", 10.5, ""), ("nothing", 20.5, "")]


@pytest.mark.parametrize("num_layers", [1, 4, 64])
def test_layers_are_sent_while_the_next_ones_are_computed(num_layers: int) -> None:
    transfers = Transfers(num_layers)
    transfers.link.begin(["a"])
    transfers.fetch("a", DIGESTS, now=1.0)
    assert transfers.done == []
    transfers.compute(*DIGESTS[:2], begins_at=2.0, ends_at=6.0)
    assert transfers.done == []
    # four seconds of bytes in all; those of the second step may begin when its first layer is there
    transfers.compute(*DIGESTS[2:], begins_at=6.0, ends_at=14.0)
    ((_, at, error),) = transfers.done
    first, last = 6.0 + 8.0 / num_layers, 14.0 + 2.0 / num_layers
    assert (at, error) == (max(first + 2.0, last) + 0.5, "")


def test_a_prompt_that_is_computed_is_promised_and_what_left_the_cache_is_not() -> None:
    transfers = Transfers()
    transfers.compute(*DIGESTS)
    transfers.link.removed(0, DIGESTS[2])
    assert transfers.link.num_promised("a", DIGESTS) == 2
    transfers.link.begin(["a"])
    assert transfers.link.num_promised("a", DIGESTS) == 4
    transfers.fetch("a", DIGESTS, now=0.0)
    transfers.link.end("a", now=7.0)
    assert transfers.link.num_promised("a", DIGESTS) == 2
    [(name, at, error)] = transfers.done
    assert (name, at) == ("a", 7.0)
    assert error


def split_simulation(min_tokens: int | None) -> Simulation:
    return Simulation(
        settings=make_settings(num_blocks=200, max_num_batched_tokens=64),
        cost_model=make_costs(step_s=1.0, prefill_token_s=0.25),
        num_replicas=3,
        disaggregation=Disaggregation(num_prefill=1, bytes_per_s=1e3, min_tokens=min_tokens),
    )


def replicas_after(trace: Trace, keep_s: float = 30.0) -> list[SimulatedReplica]:
    """One replica that computes prompts and one that decodes, after the trace."""
    rates = Disaggregation(num_prefill=1, bytes_per_s=1e3, latency_s=0.0, keep_s=keep_s, min_tokens=1)
    link = Link(rates, 32.0, 1)
    settings, costs = make_settings(num_blocks=40, max_num_batched_tokens=64), make_costs(step_s=1.0)
    replicas = [
        SimulatedReplica(0, settings, costs, link=link),
        SimulatedReplica(1, settings, costs, sources={"0": link}),
    ]
    make_split = partial(Split, [cast(Any, replicas[0])], block_size=4, keep_s=keep_s, rates=SplitRates(1))
    split = {"make_split": lambda dispatch, clock: make_split(dispatch, RoundRobin(), clock=clock)}
    Cluster(trace, replicas, RoundRobin(), **split).run()  # type: ignore[arg-type]
    for replica in replicas:
        check_scheduler(replica.scheduler)
        assert replica.num_open == 0
    return replicas


def test_nothing_is_sent_twice_and_a_prompt_costs_the_other_replica_one_token() -> None:
    turns = [
        TraceRequest(request_id="a", num_prompt_tokens=10, output_len=4, conversation="c"),
        TraceRequest(num_prompt_tokens=21, output_len=4, conversation="c", follows="a"),
    ]
    _, decoding = replicas_after(Trace(turns))
    fetched = [event for event in decoding.scheduler.log.entries if event.kind == "fetching"]
    # of six blocks, three are there: the full ones of the first prompt and of what was drawn after it
    assert [each.because for each in fetched] == ["3 blocks", "3 blocks"]
    assert decoding.scheduler.stats().num_steps == 2 * 4


def test_what_was_evicted_before_it_is_fetched_is_computed() -> None:
    # nothing is kept, and prompts fill the cache of the first replica one after the other
    trace = Trace([TraceRequest(arrival_s=0.1 * i, num_prompt_tokens=60, output_len=30) for i in range(12)])
    prompts, decoding = replicas_after(trace, keep_s=0.0)
    assert prompts.scheduler.stats().num_prompt_tokens == 12 * 60
    fetched = [event for event in decoding.scheduler.log.entries if event.kind == "fetching"]
    assert 0 < len(fetched) < 12


@pytest.mark.parametrize("min_tokens", [1, 40, None])
def test_the_same_split_simulation_twice_is_the_same_and_every_request_ends(min_tokens: int | None) -> None:
    workload = Workload(num_requests=60, request_rate=0.7, input_len=40, output_len=8, max_len=90, turns=2, n=2)
    trace = Trace(generate(workload, seed=1))
    first, second = (simulate(trace, split_simulation(min_tokens)) for _ in range(2))
    assert (first.records, first.totals) == (second.records, second.totals)
    assert [record.num_output_tokens for record in first.records] == [sum(each.output_lens) for each in trace.requests]
    assert {record.replica for record in first.records if max(trace.requests[record.number].output_lens) > 1} == {1, 2}
