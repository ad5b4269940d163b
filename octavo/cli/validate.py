"""`octavo bench validate`: loads on the engine of this machine, beside their simulation.

Requests reach the engine when their trace says, on the clock; the simulation has the same trace and settings. Both are
summarised by the same code. HTTP is in neither.
"""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from octavo.cli.bench import load, positive
from octavo.cli.calibrate import fitted, write
from octavo.cli.options import Given, count, with_options, word
from octavo.cli.report import report
from octavo.config.args import EngineArgs
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.scheduler.rates import PreemptionCosts
from octavo.simulate.cluster import Outcome, RequestRecord
from octavo.simulate.comparison import Comparison, table, to_json
from octavo.simulate.cost_model import CostModel, load_cost_model
from octavo.simulate.report import Summary, summarize
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate, read_trace

if TYPE_CHECKING:
    from octavo.llm import LLM

_BURST: Final = Workload(arrivals="at-once", input_len=96, output_len=48, length_spread=0.6)
_GRID: Final = ((1, 4, 16, 32, 64), (16, 128, 512))


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def validate(
    *,
    cost_model: Annotated[
        str | None, word("File of octavo bench calibrate; by default calibrated first.", "Benchmark")
    ] = None,
    trace: Annotated[
        str | None,
        word("File with a request per line (JSON) as the only load, instead of those that are generated.", "Benchmark"),
    ] = None,
    num_requests: Annotated[int, count("Requests of each load.", "Benchmark")] = 300,
    repetitions: Annotated[int, count("Times to measure each load; the median counts.", "Benchmark")] = 3,
    output: Annotated[str | None, word("File that gets the cost model, when it is calibrated.", "Benchmark")] = None,
    given: Given,
) -> int:
    """Compare the engine on this machine with its simulation, under several loads."""
    positive(num_requests=num_requests, repetitions=repetitions)
    traced = _alike(read_trace(trace)) if trace is not None else None
    llm = load(given)
    model = load_cost_model(cost_model) if cost_model is not None else fitted(llm, *_GRID, repetitions)[0]
    if output is not None:
        write("output", output, msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    simulation = Simulation(settings=_settings(llm, model), cost_model=model)
    loads = [Load("trace", traced)] if traced is not None else _loads(llm, simulation, num_requests)
    comparisons = []
    for each in loads:
        measured = []
        for _ in range(repetitions):
            llm.engine.call("reset_prefix_cache")
            measured.append(Live(llm, each.trace).run())
        comparisons.append(Comparison(each.name, measured, summarize(simulate(each.trace, simulation))))
    print(model.describe(), file=sys.stderr)
    print(table(comparisons), file=sys.stderr)
    report(
        "validate",
        {"model": llm.config.model.name, "num_requests": num_requests, "repetitions": repetitions},
        {"loads": to_json(comparisons)},
    )
    return 0


class Load(NamedTuple):
    """A trace by its name."""

    name: str
    trace: Trace


def _loads(llm: LLM, simulation: Simulation, num_requests: int) -> Iterator[Load]:
    """A burst, and others whose rates are shares of what the simulation of the burst serves."""
    longest = llm.engine.ready.max_model_len
    burst = msgspec.structs.replace(_BURST, num_requests=num_requests, max_len=min(longest, _BURST.max_len))
    offline = Trace(generate(burst, seed=1))
    rate = summarize(simulate(offline, simulation)).requests_per_s
    shared = min(192, longest // 2)

    def arriving(share: float, **changes: Any) -> Trace:
        changes = {"arrivals": "poisson", "request_rate": share * rate} | changes
        return Trace(generate(msgspec.structs.replace(burst, **changes), seed=2))

    yield Load("burst", offline)
    yield Load("poisson at half load", arriving(0.5))
    yield Load("poisson at 90 % load", arriving(0.9))
    yield Load("bursts at half load", arriving(0.5, arrivals="gamma"))
    yield Load("shared prefixes", arriving(0.5, shared_prefix_len=shared, num_shared_prefixes=4))
    yield Load("conversations", arriving(0.2, turns=4, think_s=0.3, input_len=32))


def _alike(trace: Trace) -> Trace:
    """The sequences of a request all as long as its longest: a model that ends them otherwise cannot be had."""
    return Trace([msgspec.structs.replace(request, output_lens=[]) for request in trace.requests])


def _settings(llm: LLM, model: CostModel) -> SchedulerSettings:
    """Of the engine itself."""
    ready, config = llm.engine.ready, llm.config
    return SchedulerSettings(
        cache=config.cache,
        scheduler=config.scheduler,
        num_blocks=ready.num_blocks,
        num_host_blocks=ready.num_host_blocks,
        preemption_costs=PreemptionCosts(block_bytes=ready.kv_block_bytes),
    )


class Live:
    """A trace on an engine, at the times that it says. `run` may be called once."""

    def __init__(self, llm: LLM, trace: Trace) -> None:
        self._engine = llm.engine
        self._trace = trace
        self._vocab_size = llm.config.model.vocab_size
        self._histories: dict[str, list[int]] = {}
        self._numbers = {name: number for number, name in enumerate(trace.ids)}
        self._records: dict[int, RequestRecord] = {}
        self._due = [(each.arrival_s, number) for number, each in enumerate(trace.requests) if each.follows is None]
        heapq.heapify(self._due)

    def run(self) -> Summary:
        """Until every request has ended."""
        engine = self._engine
        began, steps_before = time.monotonic(), engine.stats.num_steps
        preemptions_before = engine.stats.num_preemptions
        busy_s = 0.0
        while self._due or engine.has_unfinished_requests():
            now = time.monotonic() - began
            while self._due and self._due[0][0] <= now:
                self._submit(*heapq.heappop(self._due))
            if engine.has_unfinished_requests():
                before = time.monotonic()
                outputs = engine.step()
                busy_s += time.monotonic() - before
                for output in outputs:
                    self._finish(output, began)
            else:
                time.sleep(max(0.0, self._due[0][0] - now))
        stats = engine.stats
        return summarize(
            Outcome(
                records=sorted(self._records.values(), key=lambda record: record.number),
                samples=[],
                num_replicas=1,
                num_steps=stats.num_steps - steps_before,
                busy_s=busy_s,
                num_preemptions=stats.num_preemptions - preemptions_before,
                num_swapped_blocks=0,
                num_recomputed_tokens=0,
            )
        )

    def _submit(self, arrival_s: float, number: int) -> None:
        traced = self._trace.requests[number]
        prompt = self._prompt(number, traced)
        params = SamplingParams(
            max_tokens=min(traced.output_len, traced.max_tokens or traced.output_len),
            n=traced.n,
            best_of=traced.best_of,
            use_beam_search=traced.use_beam_search,
            temperature=0.0 if traced.use_beam_search or traced.width == 1 else 1.0,
            seed=number,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )
        self._records[number] = RequestRecord(
            number=number, arrival_s=arrival_s, num_sequences=traced.width, num_prompt_tokens=len(prompt)
        )
        self._engine.add_request(
            self._trace.ids[number],
            prompt,
            params,
            priority=traced.priority,
            first_token_deadline_s=traced.first_token_deadline_s,
            tenant=traced.tenant,
        )

    def _prompt(self, number: int, traced: TraceRequest) -> list[int]:
        """Random tokens; what has the same name has the same ones, and a later turn begins with all before it."""
        if traced.prompt_token_ids is not None:
            return traced.prompt_token_ids
        prompt = list(self._histories.get(traced.conversation or "", ()))
        if not prompt:
            for name, length in traced.prefixes:
                prompt += self._random(f"prefix {name}", length)
        prompt = prompt[: traced.prompt_len]
        prompt += self._random(f"request {number}", traced.prompt_len - len(prompt))
        return prompt

    def _random(self, name: str, length: int) -> list[int]:
        source = random.Random(name)
        return [source.randrange(self._vocab_size) for _ in range(length)]

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
