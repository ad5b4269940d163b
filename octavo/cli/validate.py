"""`octavo bench validate`: loads on the engine of this machine, beside their simulation.

Requests reach the engine when their trace says, on the clock; the simulation has the same trace and settings. Both are
summarised by the same code. HTTP is in neither.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from octavo.cli.bench import load_as_served, positive
from octavo.cli.calibrate import BATCH_SIZES, INPUT_LENS, fitted, write
from octavo.cli.live import Live, ProcessorClock, WallClock
from octavo.cli.options import Given, count, switch, with_options, word
from octavo.cli.report import report
from octavo.config.args import EngineArgs
from octavo.errors import ConfigError
from octavo.simulate.comparison import Comparison, table, to_json
from octavo.simulate.presets import load_cost_model
from octavo.simulate.report import summarize
from octavo.simulate.settings import served_settings
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.trace_file import read_trace
from octavo.simulate.traces import Trace, Workload, generate

if TYPE_CHECKING:
    from octavo.llm import LLM

_BURST: Final = Workload(arrivals="at-once", input_len=96, output_len=48, length_spread=0.6)


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
    repetitions: Annotated[int, count("Times to measure each load; the least disturbed counts.", "Benchmark")] = 3,
    processor_clock: Annotated[
        bool,
        switch(
            "Count the seconds in which this process had a processor, not those on the wall: for machines that other "
            "programs use too, with one thread.",
            "Benchmark",
        ),
    ] = False,
    output: Annotated[str | None, word("File that gets the cost model, when it is calibrated.", "Benchmark")] = None,
    given: Given,
) -> int:
    """Compare the engine on this machine with its simulation, under several loads."""
    positive(num_requests=num_requests, repetitions=repetitions)
    traced = _alike(read_trace(trace)) if trace is not None else None
    llm = load_as_served(given)
    if processor_clock and llm.config.device.threads != 1:
        raise ConfigError(
            f"threads is {llm.config.device.threads}, must be 1 with processor_clock: with several threads processor "
            "time and time are not the same"
        )
    model = (
        load_cost_model(cost_model)
        if cost_model is not None
        else fitted(
            llm, BATCH_SIZES, INPUT_LENS, repetitions, time.process_time if processor_clock else time.perf_counter
        )[0]
    )
    if output is not None:
        write("output", output, msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    simulation = Simulation(
        settings=served_settings(llm.config.cache, llm.config.scheduler, llm.engine.ready), cost_model=model
    )
    loads = [Load("trace", traced)] if traced is not None else _loads(llm, simulation, num_requests)
    comparisons = []
    for each in loads:
        measured = []
        for _ in range(repetitions):
            llm.engine.call("reset_prefix_cache")
            measured.append(Live(llm, each.trace, ProcessorClock() if processor_clock else WallClock()).run())
        comparisons.append(Comparison.of(each.name, measured, summarize(simulate(each.trace, simulation))))
    print(model.describe(), file=sys.stderr)
    print(table(comparisons), file=sys.stderr)
    report(
        "validate",
        {
            "model": llm.config.model.name,
            "num_requests": num_requests,
            "repetitions": repetitions,
            "processor_clock": processor_clock,
        },
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
