"""`octavo bench validate`: compares loads on the engine of this machine with their simulation.

Requests reach the engine at the times of their trace; the simulation has the same trace and settings. The same code
summarises both. Neither contains HTTP.
"""

from __future__ import annotations

import sys
import time

import msgspec

from octavo.cli.bench import load
from octavo.cli.calibrate import CalibrateOptions, fitted
from octavo.cli.live import compare, simulation_of, standard_loads
from octavo.cli.options import Given, with_options
from octavo.cli.report import check_file, report, write_file
from octavo.config.args import EngineArgs
from octavo.config.fields import Arguments, arg
from octavo.errors import ConfigError
from octavo.simulate.comparison import check_of, table, to_json
from octavo.simulate.cost_model import Fitted
from octavo.simulate.presets import load_cost_model
from octavo.simulate.trace_file import read_trace
from octavo.simulate.traces import Trace


class ValidateOptions(Arguments, heading="Benchmark"):
    """Options of `octavo bench validate`: the compared loads, and the source of the cost model."""

    cost_model: str | None = arg(
        None, "Cost model that octavo bench calibrate has written; by default it is calibrated first."
    )
    trace: str | None = arg(
        None, "File with a request per line (JSON) as the only load, instead of those that are generated."
    )
    num_requests: int = arg(300, "Requests of each load.", ge=1)
    repetitions: int = arg(3, "How often to measure each load; the result is the least disturbed measurement.", ge=1)
    processor_clock: bool = arg(
        False,
        "Measure processor time of this process instead of elapsed time: for machines that other programs use "
        "too, with one thread.",
    )
    output: str | None = arg(None, "File that gets the cost model, when it is calibrated.")


@with_options(ValidateOptions, EngineArgs)
def validate(*, given: Given) -> None:
    """Compare the engine on this machine with its simulation, under several loads."""
    options = given.own(ValidateOptions)
    check_file("output", options.output)
    traced = _alike(read_trace(options.trace)) if options.trace is not None else None
    llm = load(given, as_served=True)
    if options.processor_clock and llm.config.device.threads != 1:
        raise ConfigError(
            f"threads is {llm.config.device.threads}, must be 1 with processor_clock: with several threads processor "
            "time and time are not the same"
        )
    if options.cost_model is not None:
        model = load_cost_model(options.cost_model)
    else:
        grid = CalibrateOptions(repetitions=options.repetitions).grid()
        model, _ = fitted(llm, grid, time.process_time if options.processor_clock else time.perf_counter)
    simulation = simulation_of(llm, model)
    num_requests, repetitions = options.num_requests, options.repetitions
    loads = [("trace", traced)] if traced is not None else standard_loads(llm, simulation, num_requests)
    comparisons = compare(llm, simulation, loads, repetitions, on_processor_clock=options.processor_clock)
    if options.cost_model is None and traced is None and isinstance(model, Fitted):
        model = msgspec.structs.replace(model, checks=tuple(map(check_of, comparisons)))
    write_file("output", options.output, msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    print(model.describe(), file=sys.stderr)
    print(table(comparisons), file=sys.stderr)
    report(
        "validate",
        {
            "model": llm.config.model.name,
            "num_requests": num_requests,
            "repetitions": repetitions,
            "processor_clock": options.processor_clock,
        },
        {"loads": to_json(comparisons)},
    )


def _alike(trace: Trace) -> Trace:
    """Return the trace with all sequences of a request as long as its longest: a real engine ends them together."""
    return Trace([msgspec.structs.replace(request, output_lens=[]) for request in trace.requests])
