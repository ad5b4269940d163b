"""`octavo simulate`: the scheduler and its block manager in simulated time. Needs neither weights nor torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from octavo.cli.options import Given, with_options
from octavo.cli.simulate_options import DEFAULT_COST_MODEL, SimulationOptions, WorkloadOptions
from octavo.cli.terminal import progress, say
from octavo.config.args import EngineArgs
from octavo.config.effects import without_effect
from octavo.config.fields import arguments
from octavo.errors import ConfigError, suggestion
from octavo.platform import Platform
from octavo.simulate.cluster import Disaggregation
from octavo.simulate.comparison import expected_error
from octavo.simulate.cost_model import CostModel, Fitted
from octavo.simulate.device import read_device
from octavo.simulate.film import film
from octavo.simulate.model_facts import read_model_facts
from octavo.simulate.presets import load_cost_model, roofline
from octavo.simulate.raster import whole_picture
from octavo.simulate.recorded import Recorded, read_recorded, recorded_arguments, recorded_costs
from octavo.simulate.replay import Replay
from octavo.simulate.report import Run, picture, summarize, table, to_json
from octavo.simulate.router import ROUTERS
from octavo.simulate.settings import engine_settings
from octavo.simulate.simulation import Simulation
from octavo.simulate.simulation import simulate as run_simulation
from octavo.simulate.trace_file import read_trace, write_trace
from octavo.simulate.traces import Trace, generate

_ROUGH_FIT = 0.2
"""A median error of steps beyond which a fitted cost model is warned of."""
_KEPT = {"max_model_len", "gpu_memory_utilization"}
_OPTIONS: Final = arguments(SimulationOptions)
_NOT_SIMULATED = tuple(
    argument.name
    for argument in arguments(EngineArgs).values()
    if argument.arg.group not in ("Memory and cache", "Scheduling") and argument.name not in _KEPT | _OPTIONS.keys()
)
"""Engine arguments that decide nothing about scheduling."""
_OF_GENERATOR: Final = (*arguments(WorkloadOptions), "seed", "save_trace")
_OF_REPLAY: Final = ("replay", "svg", "first_step", "num_steps")
_OF_ROOFLINE: Final = ("model", "device", "tensor_parallel_size")


class _Load(NamedTuple):
    """What arrives: a trace at each rate, or a single one without; and the recording that it is from."""

    traces: list[Trace]
    rates: Sequence[float | None]
    recorded: Recorded | None


@with_options(
    SimulationOptions, WorkloadOptions, EngineArgs, without=(*_NOT_SIMULATED, "kv_cache_memory", "kv_cache_dtype")
)
def simulate(*, given: Given) -> int:
    """Run the scheduler in simulated time: the same code that serves, over steps that a cost model times."""
    options = given.own(SimulationOptions)
    _refuse_contradictions(options, given)
    if options.replay is not None:
        return _replay(options)
    recorded = _recorded(options.recording)
    args = _engine_args(recorded, given)
    load = _load(options, given.own(WorkloadOptions), recorded, args.max_model_len)
    model = _cost_model(options, recorded)
    simulation = Simulation(
        settings=engine_settings(args, model, max_model_len=args.max_model_len or _longest(load.traces)),
        cost_model=model,
        num_replicas=options.replicas,
        router=options.router,
        disaggregation=None
        if options.disaggregated is None
        else Disaggregation(num_prefill=options.disaggregated, bytes_per_s=options.transfer_bytes_per_s),
    )
    _print_header(simulation, args, recorded)
    runs = []
    began = time.perf_counter()
    for rate, trace in zip(load.rates, load.traces, strict=True):
        with progress("simulating") as on_finish:
            outcome = run_simulation(trace, simulation, options.processes or Platform.detect().cores, on_finish)
        runs.append(Run(summarize(outcome), outcome, rate))
        if isinstance(model, Fitted) and (error := expected_error(model.checks, runs[-1].summary)):
            print(error)
        print(table(runs[-1]), end="\n\n")
        if recorded is not None and runs[-1].summary.num_failed and (limits := _limits(args, recorded)):
            say(f"requests are refused by limits of the queue, the recorded ones unless given here: {limits}\n")
    elapsed = time.perf_counter() - began
    print(f"simulated in {elapsed:,.1f} s", file=sys.stderr)
    _write_files(options, model, runs, elapsed)
    return 0


def _refuse_contradictions(options: SimulationOptions, given: Given) -> None:
    """Raise ConfigError for options that others leave without effect."""
    if sum(each is not None for each in (options.replay, options.recording, options.trace)) > 1:
        raise ConfigError("of replay, recording and trace only one can be given; leave out the others")
    for_generator = [name for name in given.values if name in _OF_GENERATOR]
    if options.replay is not None:
        others = [name for name in given.values if name not in (*_OF_REPLAY, *for_generator)]
        others += ["config"] * (given.config is not None) + for_generator
        if others:
            raise ConfigError(
                f"{others[0]} is for simulations, but replay is given, which decides as it was recorded; leave out one "
                "of them, or give recording instead of replay"
            )
    for name in ("first_step", "num_steps"):
        if getattr(options, name) is not None and (options.replay is None or options.svg is None):
            raise ConfigError(f"{name} is for the picture of a replay; give replay and svg too, or leave it out")
    source = "recording" if options.recording is not None else "trace"
    if for_generator and getattr(options, source) is not None:
        raise ConfigError(f"{for_generator[0]} is for generated requests, but {source} is given; leave out one of them")
    if options.router not in ROUTERS:
        raise ConfigError(
            f"router is {options.router!r}, must be one of {', '.join(ROUTERS)}{suggestion(options.router, ROUTERS)}"
        )
    of_roofline = [name for name in _OF_ROOFLINE if name in given.values]
    if of_roofline and options.cost_model is not None:
        raise ConfigError(f"{of_roofline[0]} and cost_model both say what steps cost; leave out one of them")
    if of_roofline and (options.model is None or options.device is None):
        missing = "model" if options.model is None else "device"
        raise ConfigError(f"{of_roofline[0]} is given, but {missing} is not; a model and a device go together")


def _recorded(recording: str | None) -> Recorded | None:
    if recording is None:
        return None
    with progress("reading the recording") as on_read:
        return read_recorded(recording, on_read)


def _engine_args(recorded: Recorded | None, given: Given) -> EngineArgs:
    """What is given, over what was recorded but for what that leaves without effect."""
    values = {name: value for name, value in given.values.items() if name not in _OPTIONS}
    if recorded is None:
        return Given(given.config, values).arguments(EngineArgs)
    old = recorded_arguments(recorded)
    idle = without_effect(Given(given.config, old | values).arguments(EngineArgs))
    kept = {name: value for name, value in old.items() if name not in idle}
    return Given(given.config, kept | values).arguments(EngineArgs)


def _load(
    options: SimulationOptions, workload: WorkloadOptions, recorded: Recorded | None, max_model_len: int | None
) -> _Load:
    workloads = workload.workloads(max_model_len)
    if recorded is not None:
        return _Load([Trace(recorded.requests)], [None], recorded)
    if options.trace is not None:
        return _Load([read_trace(options.trace)], [None], None)
    traces = [Trace(generate(each, options.seed)) for each in workloads]
    if options.save_trace is not None:
        write_trace(options.save_trace, traces[-1].requests)
    return _Load(traces, [None if each.arrivals == "at-once" else each.request_rate for each in workloads], None)


def _cost_model(options: SimulationOptions, recorded: Recorded | None) -> CostModel:
    if options.model is not None and options.device is not None:
        device = read_device(options.device)
        return roofline(read_model_facts(options.model), device, options.tensor_parallel_size)
    if recorded is not None and options.cost_model is None:
        return recorded_costs(f"recorded steps of {options.recording}", recorded)
    return load_cost_model(options.cost_model or DEFAULT_COST_MODEL)


def _print_header(simulation: Simulation, args: EngineArgs, recorded: Recorded | None) -> None:
    model = simulation.cost_model
    if recorded is not None:
        left_out = f", and {recorded.num_left_out:,} that produced nothing" if recorded.num_left_out else ""
        print(f"As recorded{left_out}:\n{table(Run(summarize(recorded.outcome), recorded.outcome))}\n\nSimulated:")
    say(model.describe())
    if isinstance(model, Fitted) and model.fit_error > _ROUGH_FIT:
        say(
            f"warning: half of the measured steps are off by more than {model.fit_error:.0%}, as on a busy machine: "
            "times below are rough; measure on an idle one, or give another cost_model"
        )
    num_blocks = simulation.settings.num_blocks
    print(f"{num_blocks:,} KV blocks of {args.block_size} tokens each, router {simulation.router}\n")


def _write_files(options: SimulationOptions, model: CostModel, runs: Sequence[Run], elapsed_s: float) -> None:
    if options.output is not None:
        body = {
            "cost_model": msgspec.to_builtins(model),
            "elapsed_s": elapsed_s,
            "runs": [to_json(run) for run in runs],
        }
        _write("output", options.output, msgspec.json.format(msgspec.json.encode(body)))
    if options.svg is not None:
        several = f"{options.replicas} × " if options.replicas > 1 else ""
        title = f"{runs[-1].summary.num_requests:,} requests, {several}{model.name}"
        _write("svg", options.svg, picture(title, runs).encode())


def _limits(args: EngineArgs, recorded: Recorded) -> str:
    """What refuses requests that an empty engine would serve."""
    limits = {"max_queued_requests": args.max_queued_requests, "max_queued_tokens": args.max_queued_tokens}
    names = [f"{name} {value}" for name, value in limits.items() if value is not None]
    if any(request.first_token_deadline_s is not None for request in recorded.requests):
        names.append("deadlines of first tokens")
    return ", ".join(names)


def _longest(traces: Sequence[Trace]) -> int:
    return max(request.prompt_len + request.output_len for trace in traces for request in trace.requests)


def _replay(options: SimulationOptions) -> int:
    assert options.replay is not None, "a replay has a recording"
    with progress("replaying") as on_read:
        result = Replay(options.replay, on_read).run()
    stats = result.stats
    print(
        f"{result.num_requests:,} requests, {result.num_steps:,} steps, {stats.num_generated_tokens:,} tokens, "
        f"{stats.num_preemptions:,} preemptions, {stats.num_cached_tokens:,} tokens found in the cache"
    )
    if result.first_difference is None:
        print("every step is the recorded one")
        if options.svg is not None:
            first_step = 1 if options.first_step is None else options.first_step
            num_steps = 400 if options.num_steps is None else options.num_steps
            with progress("drawing") as on_read:
                drawn = film(options.replay, first_step, num_steps, on_read)
            _write("svg", options.svg, whole_picture(drawn).encode())
        return 0
    print(f"step {result.first_difference:,} is another than the recorded one: this version decides otherwise")
    return 1


def _write(name: str, path: str, body: bytes) -> None:
    try:
        Path(path).expanduser().write_bytes(body)
    except OSError as error:
        raise ConfigError(f"{name} is {path!r}, which cannot be written: {error.strerror}") from error
