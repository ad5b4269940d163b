"""Runs loads on the engine of this process, at the times of their traces, and simulates them.

`octavo bench validate` compares both; `octavo bench calibrate` does so for the loads that it holds out of its fit.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from octavo.core.messages import EngineCoreRequest, StepTimes
from octavo.core.outputs import RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind
from octavo.core.step import SchedulerOutput
from octavo.engine.engine_core import EngineCore
from octavo.errors import ConfigError
from octavo.simulate.comparison import Comparison, Measured
from octavo.simulate.cost_model import CostModel
from octavo.simulate.executor import END_TOKEN, TokenGaps
from octavo.simulate.outcome import Outcome, RequestRecord, Totals
from octavo.simulate.report import summarize
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.traces import Trace, Workload, generate

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM


_BURST: Final = Workload(arrivals="at-once", input_len=96, output_len=48, length_spread=0.6)

Load = tuple[str, Trace]
"""A trace and its name before it."""


def standard_loads(llm: LLM, simulation: Simulation, num_requests: int) -> Iterator[Load]:
    """Yield a burst, and loads whose rates are shares of the rate at which the simulation serves the burst."""
    longest = llm.engine.ready.max_model_len
    burst = dataclasses.replace(_BURST, num_requests=num_requests, max_len=min(longest, _BURST.max_len))
    offline = Trace(generate(burst, seed=1))
    rate = summarize(simulate(offline, simulation)).requests_per_s
    shared, long = min(192, longest // 2), min(8 * burst.input_len, longest // 2)

    def arriving(share: float, **changes: Any) -> Trace:
        workload = dataclasses.replace(burst, arrivals="poisson", request_rate=share * rate)
        return Trace(generate(dataclasses.replace(workload, **changes), seed=2))

    yield "burst", offline
    yield "poisson at half load", arriving(0.5)
    yield "poisson at 90 % load", arriving(0.9)
    yield "bursts at half load", arriving(0.5, arrivals="gamma")
    yield "long prompts", arriving(0.5 * burst.input_len / long, input_len=long)
    yield "shared prefixes", arriving(0.5, shared_prefix_len=shared, num_shared_prefixes=4)
    yield "conversations", arriving(0.2, turns=4, think_s=0.3, input_len=32)


def simulation_of(llm: LLM, model: CostModel) -> Simulation:
    """Return this engine in simulated time."""
    return Simulation.of_engine(llm.config.cache, llm.config.scheduler, llm.engine.ready.cache, model)


def compare(
    llm: LLM, simulation: Simulation, loads: Iterable[Load], repetitions: int, *, on_processor_clock: bool = False
) -> list[Comparison]:
    """Run every load on the engine and simulate it; return both."""
    comparisons = []
    for name, trace in loads:
        measured = []
        for _ in range(repetitions):
            llm.engine.call("reset_prefix_cache")
            measured.append(Live(llm, trace, ProcessorClock() if on_processor_clock else WallClock()).run())
        comparisons.append(Comparison.of(name, measured, summarize(simulate(trace, simulation))))
    return comparisons


class WallClock:
    """Reads seconds on the wall."""

    __call__ = staticmethod(time.monotonic)
    wait = staticmethod(time.sleep)


class ProcessorClock:
    """Reads the seconds in which this process had a processor, plus those of `wait`: the time of other programs does
    not count. It starts at the time of the wall clock, and is right for an engine with one thread."""

    def __init__(self) -> None:
        self._skipped_s = time.monotonic() - time.process_time()

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def wait(self, seconds: float) -> None:
        """Wait for this time."""
        self._skipped_s += seconds


class Live:
    """Runs a trace on an engine, with requests at the times of the trace. `run` may be called once."""

    def __init__(self, llm: LLM, trace: Trace, clock: WallClock | ProcessorClock | None = None) -> None:
        self._engine = llm.engine
        self._clock = clock or WallClock()
        self._trace = trace
        self._histories: dict[str, list[int]] = {}
        self._numbers = {name: number for number, name in enumerate(trace.ids)}
        self._records: dict[int, RequestRecord] = {}
        self._due = [(each.arrival_s, number) for number, each in enumerate(trace.requests) if each.follows is None]
        heapq.heapify(self._due)
        # made before the clock starts: the clients of a server make the prompts
        vocab_size = llm.config.model.vocab_size
        self._requests = [_with_tokens(trace.request(number, 0.0)[0], vocab_size) for number in range(len(trace))]

    def run(self) -> Measured:
        """Run until every request has ended; return what was measured."""
        with _on_clock(self._engine, self._clock) as times:
            return self._run(times)

    def _run(self, times: list[StepTimes]) -> Measured:
        gaps, in_flight = TokenGaps(), deque[SchedulerOutput]()
        engine, clock = self._engine, self._clock
        began, steps_before = clock(), engine.stats.num_steps
        preemptions_before = engine.stats.num_preemptions
        busy_s = cpu_s = 0.0
        while self._due or engine.has_unfinished_requests():
            now = clock() - began
            while self._due and self._due[0][0] <= now:
                self._submit(*heapq.heappop(self._due))
            if engine.has_unfinished_requests():
                before, cpu_before = clock(), time.process_time()
                outputs = engine.step()
                busy_s += clock() - before
                cpu_s += time.process_time() - cpu_before
                in_flight += [step for each in times for step in each.planned]
                if times and in_flight:
                    gaps.note([row.seq_id for row in in_flight.popleft().rows if row.num_samples], clock())
                times.clear()
                for output in outputs:
                    self._finish(output, began)
            else:
                clock.wait(max(0.0, self._due[0][0] - now))
        stats = engine.stats
        outcome = Outcome(
            records=sorted(self._records.values(), key=lambda record: record.number),
            samples=[],
            num_replicas=1,
            totals=Totals(
                num_steps=stats.num_steps - steps_before,
                busy_s=busy_s,
                num_preemptions=stats.num_preemptions - preemptions_before,
                gaps=dict(gaps.counts),
            ),
        )
        share = None if isinstance(clock, ProcessorClock) else min(1.0, cpu_s / max(busy_s, 1e-9))
        return Measured(summarize(outcome), share)

    def _submit(self, arrival_s: float, number: int) -> None:
        request, traced = self._requests[number], self._trace.requests[number]
        # a later turn begins with all before it
        prompt = list(self._histories.get(traced.conversation or "", ()))
        prompt = (prompt + request.prompt_token_ids[len(prompt) :])[: traced.prompt_len]
        params = msgspec.structs.replace(
            request.params,
            max_tokens=traced.final_len,
            temperature=0.0 if traced.use_beam_search or traced.width == 1 else 1.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )
        self._records[number] = RequestRecord(
            number=number, arrival_s=arrival_s, num_sequences=traced.width, num_prompt_tokens=len(prompt)
        )
        self._engine.add_request(
            request.request_id,
            Prompt(token_ids=prompt, cache_salt=request.cache_salt, cache_namespace=request.cache_namespace),
            params,
            priority=request.priority,
            first_token_deadline_s=request.first_token_deadline_s,
            tenant=request.tenant,
        )

    def _finish(self, output: RequestOutput, began: float) -> None:
        number = self._numbers[output.request_id]
        record, traced, metrics = self._records[number], self._trace.requests[number], output.metrics
        if output.error is not None:
            raise ConfigError(f"request {output.request_id!r} was refused: {output.error.message}")
        assert metrics is not None, "a served request has its times"
        assert metrics.first_scheduled_time is not None, "it ran"
        assert metrics.first_token_time is not None, "it has at least one token"
        assert metrics.finished_time is not None, "it has ended"
        record.first_scheduled_s = metrics.first_scheduled_time - began
        record.first_token_s = metrics.first_token_time - began
        record.finished_s = metrics.finished_time - began
        record.num_output_tokens = record.num_sequences * len(output.outputs[0].token_ids)
        record.num_cached_tokens = output.num_cached_tokens or 0
        if traced.conversation is not None:
            self._histories[traced.conversation] = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        for follower in self._trace.followers.get(number, ()):
            heapq.heappush(self._due, (record.finished_s + self._trace.requests[follower].arrival_s, follower))


def _with_tokens(request: EngineCoreRequest, vocab_size: int) -> EngineCoreRequest:
    """Return the request with random tokens in place of the ids of streams; a stream has the same ones everywhere."""
    streams = request.prompt_token_ids
    if min(streams) < END_TOKEN:
        return request
    tokens = {each: random.Random(each).choices(range(vocab_size), k=len(streams)) for each in set(streams)}
    prompt = [tokens[stream][place] for place, stream in enumerate(streams)]
    return msgspec.structs.replace(request, prompt_token_ids=prompt)


def core_of(engine: LLMEngine) -> EngineCore:
    assert isinstance(engine.core, EngineCore), "the engine is in this process"
    return engine.core


@contextmanager
def _on_clock(engine: LLMEngine, clock: WallClock | ProcessorClock) -> Iterator[list[StepTimes]]:
    """Inside, the engine reads this clock, and what each step planned is appended to the list."""
    core = core_of(engine)
    before, core.clock = core.clock, clock
    try:
        with engine.timed_steps() as times:
            yield times
    finally:
        core.clock = before
