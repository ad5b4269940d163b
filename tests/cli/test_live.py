"""A trace on a real engine, on the clock."""

from __future__ import annotations

import itertools
import time

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.live import Live, ProcessorClock
from octavo.core.step_times import PARTS
from octavo.engine.engine_core import EngineCore
from octavo.errors import ContextTooLong
from octavo.scheduler.scheduler import Scheduler
from octavo.simulate.traces import Trace, TraceRequest


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(model=tiny_model, max_num_seqs=4, num_gpu_blocks_override=40, max_model_len=128)


def test_requests_come_when_the_trace_says_and_are_as_long(llm: LLM) -> None:
    requests = [TraceRequest(arrival_s=0.05 * i, num_prompt_tokens=20, output_len=3 + i) for i in range(3)]
    measured = Live(llm, Trace(requests)).run()
    summary = measured.summary
    assert (summary.num_requests, summary.num_failed) == (3, 0)
    assert summary.duration_s > 0.1
    assert summary.output_tokens_per_s == pytest.approx((3 + 4 + 5) / summary.duration_s)
    assert 0 < summary.time_to_first_token_s.mean < summary.latency_s.mean
    assert measured.processor_share is not None
    assert 0 < measured.processor_share <= 1


def test_on_the_processors_clock_waiting_takes_no_time_and_is_counted(llm: LLM) -> None:
    requests = [TraceRequest(arrival_s=1000.0 * i, num_prompt_tokens=20, output_len=4) for i in range(2)]
    began = time.monotonic()
    measured = Live(llm, Trace(requests), ProcessorClock()).run()
    assert time.monotonic() - began < 60
    assert measured.processor_share is None
    assert 1000 < measured.summary.duration_s < 1010
    assert 0 < measured.summary.time_to_first_token_s.mean < measured.summary.latency_s.mean < 5


def test_a_later_turn_begins_with_the_tokens_that_were_produced(llm: LLM) -> None:
    first = TraceRequest(request_id="a", num_prompt_tokens=21, output_len=12, conversation="c")
    second = TraceRequest(request_id="b", num_prompt_tokens=40, output_len=2, conversation="c", follows="a")
    llm.engine.call("reset_prefix_cache")
    summary = Live(llm, Trace([first, second])).run().summary
    # all of the first but its last token, whose keys and values were never computed
    assert summary.cached_share == (21 + 12 - 1) / (21 + 40)


def test_shared_prefixes_are_shared_and_other_tokens_are_not(llm: LLM) -> None:
    llm.engine.call("reset_prefix_cache")
    requests = [
        TraceRequest(num_prompt_tokens=40, prefixes=[("system", 32)], output_len=1),
        TraceRequest(arrival_s=0.1, num_prompt_tokens=40, prefixes=[("system", 32)], output_len=1),
        TraceRequest(arrival_s=0.2, num_prompt_tokens=40, output_len=1),
    ]
    assert Live(llm, Trace(requests)).run().summary.cached_share == pytest.approx(32 / 120, abs=2 / 120)


def test_salts_and_namespaces_of_the_trace_reach_the_engine(llm: LLM) -> None:
    llm.engine.call("reset_prefix_cache")
    keys = [{}, {"cache_salt": "s"}, {"cache_namespace": "n"}, {"cache_namespace": "n"}]
    requests = [
        TraceRequest(arrival_s=0.1 * number, num_prompt_tokens=33, prefixes=[("all", 33)], output_len=1, **key)  # type: ignore[arg-type]
        for number, key in enumerate(keys)
    ]
    assert Live(llm, Trace(requests)).run().summary.cached_share == 32 / (4 * 33)


def test_what_the_engine_refuses_is_named(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="the prompt has 4000 tokens"):
        Live(llm, Trace([TraceRequest(num_prompt_tokens=4000, output_len=1)])).run()


def test_step_times_are_reported_while_they_are_asked_for(llm: LLM) -> None:
    engine = llm.engine
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with engine.timed_steps() as steps:
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
    num_steps = len(steps)
    assert [len(step.planned) for step in steps] == [1] * num_steps
    for step, following in itertools.pairwise(steps):
        assert set(step.parts) == set(PARTS)
        assert min(part.total_ns for part in step.parts.values()) > 0
        assert sum(part.total_ns for part in step.parts.values()) <= following.began_ns - step.began_ns
    # afterwards nothing is measured, and the engine consists of the same objects as before
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(steps) == num_steps
    core = engine.core
    assert isinstance(core, EngineCore)
    assert type(core.scheduler) is Scheduler
