"""`octavo simulate`: runs the scheduler and its block manager in simulated time. Needs neither weights nor torch."""

from __future__ import annotations

import sys
import time
from typing import Final, Literal

import msgspec

from octavo.cli.options import Given, with_options
from octavo.cli.report import check_file, write_file
from octavo.cli.terminal import progress, say
from octavo.config.args import EngineArgs
from octavo.config.effects import without_effect
from octavo.config.fields import Arguments, arg, arguments
from octavo.config.speculative_args import speculative_config
from octavo.engine.cores.router import ROUTERS
from octavo.errors import ConfigError
from octavo.platform import Platform
from octavo.simulate.comparison import expected_error
from octavo.simulate.cost_model import CostModel, Fitted
from octavo.simulate.device import read_device
from octavo.simulate.link import Disaggregation
from octavo.simulate.model_facts import read_model_facts
from octavo.simulate.presets import Layout, load_cost_model, roofline
from octavo.simulate.recorded import Recorded, read_recorded, recorded_arguments, recorded_costs
from octavo.simulate.report import Run, summarize, table, to_json
from octavo.simulate.settings import engine_settings
from octavo.simulate.simulation import Simulation
from octavo.simulate.simulation import simulate as run_simulation
from octavo.simulate.speculation import Guessing
from octavo.simulate.trace_file import read_trace
from octavo.simulate.traces import Trace, Workload, generate

_DEFAULT_COST_MODEL: Final = "h100/llama-3.1-8b"
_ROUGH_FIT: Final = 0.2
"""Median error of the steps above which a fitted cost model causes a warning."""


class SimulationOptions(Arguments, heading="Simulation"):
    """Options of a simulation besides the engine arguments and the workload, and the files for its results."""

    trace: str | None = arg(None, "File with a request per line (JSON), instead of a generated one.")
    recording: str | None = arg(
        None,
        "Recording of octavo serve --record-trace, whose requests are simulated: with its settings where none are "
        "given here, and its steps as cost model unless one is given.",
    )
    model: str | None = arg(
        None,
        "Model whose steps are estimated, on --device: a name such as llama-3.1-70b, one of the hub (only "
        "config.json is fetched), a directory, or a config.json.",
    )
    device: str | None = arg(
        None, "What the model runs on: a100, h100, h200, l4 and others, or a JSON file of your own."
    )
    tensor_parallel_size: int = arg(1, "Devices that share each layer of --model.", ge=1, le=1024)
    pipeline_parallel_size: int = arg(1, "Groups of devices that share the layers of --model.", ge=1, le=8)
    tensor_parallel_reduce: Literal["gather", "sum"] = arg(
        "gather", "How devices put together the parts of a layer: gather is exact, sum sends less."
    )
    cost_model: str | None = arg(
        None,
        "What steps cost, instead of --model and --device: DEVICE/MODEL, or a JSON file such as octavo bench "
        f"calibrate writes. [default: {_DEFAULT_COST_MODEL}]",
    )
    replicas: int = arg(1, "Engines behind the router.", ge=1)
    router: str = arg("round-robin", "Which replica gets a request.", choices=tuple(ROUTERS))
    disaggregated: int | None = arg(None, "Number of replicas that compute long prompts for the others.")
    transfer_bytes_per_s: float = arg(
        Disaggregation(num_prefill=1).bytes_per_s,
        "Bytes of keys and values that move per second from a replica of --disaggregated to another.",
        gt=0,
    )
    draft_acceptance: float | None = arg(
        None, "Probability that a guess of speculative_config is right, if those before it were.", ge=0, le=1
    )
    request_rate: str = arg(
        f"{Workload.request_rate:g}",
        "Requests (conversations) a second; several, as in 1,2,4, are as many simulations.",
        group="Workload",
    )
    seed: int = arg(0, "Seed of the generated requests.")
    processes: int | None = arg(
        None, "Processes that simulate the replicas in parallel, where these do not depend on each other.", ge=1
    )
    output: str | None = arg(None, "File to which the whole report is written as JSON.")
    save_trace: str | None = arg(None, "File to which the generated trace is written.")

    def rates(self) -> list[float]:
        """Return the numbers of `request_rate`. Raises ConfigError."""
        try:
            return [float(text) for text in self.request_rate.split(",")]
        except ValueError as error:
            raise ConfigError(
                f"request_rate is {self.request_rate!r}, expected a number, or numbers between commas"
            ) from error


_OPTIONS: Final = arguments(SimulationOptions)
_OF_GENERATOR: Final = {*arguments(Workload), "seed", "save_trace"}
_OF_ROOFLINE: Final = ("model", "device", "tensor_parallel_size", "pipeline_parallel_size", "tensor_parallel_reduce")
_NOT_SIMULATED: Final = [
    argument.name
    for argument in arguments(EngineArgs).values()
    if argument.group not in ("Memory and cache", "Scheduling", "Speculative decoding")
    and argument.name not in {"max_model_len", "gpu_memory_utilization", "split_min_tokens", *_OPTIONS}
]
"""Engine arguments that have no effect on scheduling."""


@with_options(
    SimulationOptions, Workload, EngineArgs, without=(*_NOT_SIMULATED, "kv_cache_memory", "kv_cache_dtype", "max_len")
)
def simulate(*, given: Given) -> None:
    """Run the scheduler in simulated time: the same code that serves, over steps that a cost model times."""
    options = given.own(SimulationOptions)
    check_file("output", options.output)
    check_file("save_trace", options.save_trace)
    _refuse_contradictions(options, given)
    recorded = _recorded(options.recording)
    args = _engine_args(recorded, given)
    loads = _loads(options, given, recorded, args.max_model_len)
    model = _cost_model(options, recorded)
    longest = max(request.prompt_len + request.output_len for _, trace in loads for request in trace.requests)
    simulation = Simulation(
        settings=engine_settings(args, model, max_model_len=args.max_model_len or longest),
        cost_model=model,
        num_replicas=options.replicas,
        router=options.router,
        disaggregation=None
        if options.disaggregated is None
        else Disaggregation(
            num_prefill=options.disaggregated,
            bytes_per_s=options.transfer_bytes_per_s,
            min_tokens=args.split_min_tokens,
        ),
        guessing=_guessing(args, options.draft_acceptance),
    )
    _print_header(simulation, args, recorded)
    say(f"{_generated(given, options)}\n" if recorded is None and options.trace is None else "")
    runs = []
    began = time.perf_counter()
    for rate, trace in loads:
        with progress(f"simulating {len(trace):,} requests") as on_finish:
            outcome = run_simulation(trace, simulation, options.processes or Platform.detect().cores, on_finish)
        runs.append(Run(summarize(outcome), outcome, rate))
        if isinstance(model, Fitted) and (error := expected_error(model.checks, runs[-1].summary)):
            print(error)
        print(table(runs[-1]), end="\n\n")
        if recorded is not None and runs[-1].summary.num_failed and (limits := _limits(args, recorded)):
            say(f"requests are refused by limits of the queue, the recorded ones unless given here: {limits}\n")
    elapsed = time.perf_counter() - began
    print(f"simulated in {elapsed:,.1f} s", file=sys.stderr)
    if options.output is not None:
        body = {"cost_model": model, "elapsed_s": elapsed, "runs": [to_json(run) for run in runs]}
        write_file("output", options.output, msgspec.json.format(msgspec.json.encode(body)))


def _refuse_contradictions(options: SimulationOptions, given: Given) -> None:
    """Raise ConfigError for options that have no effect beside others."""
    if options.recording is not None and options.trace is not None:
        raise ConfigError("of recording and trace only one can be given; leave out the other")
    source = "recording" if options.recording is not None else "trace"
    for_generator = [name for name in given.values if name in _OF_GENERATOR]
    if for_generator and getattr(options, source) is not None:
        raise ConfigError(f"{for_generator[0]} is for generated requests, but {source} is given; leave out one of them")
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
    """Return the recorded arguments, replaced by the given ones, without recorded ones that would have no effect."""
    given = given.without(SimulationOptions)
    if recorded is None:
        return given.arguments(EngineArgs)
    old = recorded_arguments(recorded)
    idle = without_effect(Given(given.config, old | given.values).arguments(EngineArgs))
    kept = {name: value for name, value in old.items() if name not in idle}
    return Given(given.config, kept | given.values).arguments(EngineArgs)


def _loads(
    options: SimulationOptions, given: Given, recorded: Recorded | None, max_model_len: int | None
) -> list[tuple[float | None, Trace]]:
    """Return the traces, each with the request rate for which it was generated, None for other traces."""
    values = given.values_of(Workload)
    max_len = max_model_len or Workload.max_len
    workloads = [Workload(**values | {"request_rate": rate, "max_len": max_len}) for rate in options.rates()]
    if recorded is not None:
        return [(None, Trace(recorded.requests))]
    if options.trace is not None:
        return [(None, read_trace(options.trace))]
    loads = [
        (None if each.arrivals == "at-once" else each.request_rate, Trace(generate(each, options.seed)))
        for each in workloads
    ]
    if options.save_trace is not None:
        write_file("save_trace", options.save_trace, msgspec.json.Encoder().encode_lines(loads[-1][1].requests))
    return loads


def _generated(given: Given, options: SimulationOptions) -> str:
    load = Workload(**given.values_of(Workload) | {"request_rate": options.rates()[0]})
    rate = "at once" if load.arrivals == "at-once" else f"{options.request_rate} a second"
    return (
        f"{load.num_requests:,} generated requests, {rate}, of {load.input_len:g} tokens and {load.output_len:g} of "
        "output on average"
    )


def _cost_model(options: SimulationOptions, recorded: Recorded | None) -> CostModel:
    if options.model is not None and options.device is not None:
        layout = Layout(
            tensor=options.tensor_parallel_size,
            pipeline=options.pipeline_parallel_size,
            reduce=options.tensor_parallel_reduce,
        )
        return roofline(read_model_facts(options.model), read_device(options.device), layout)
    if recorded is not None and options.cost_model is None:
        return recorded_costs(f"recorded steps of {options.recording}", recorded)
    return load_cost_model(options.cost_model or _DEFAULT_COST_MODEL)


def _guessing(args: EngineArgs, acceptance: float | None) -> Guessing | None:
    """Return the parameters of simulated guesses; None for no guesses. Raises ConfigError if one of the two options is
    missing."""
    config = speculative_config(args)
    if (config is None) != (acceptance is None):
        raise ConfigError("speculative_config and draft_acceptance are simulated together; give both or neither")
    if config is not None and config.has_model:
        raise ConfigError(
            f"speculative_config: method is {config.method}, whose guesses take time of their own, and simulated ones "
            "take none; take the method ngram"
        )
    return None if config is None or acceptance is None else Guessing(config, acceptance)


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
    num_blocks, split = simulation.settings.limits.num_blocks, simulation.disaggregation
    apart = "" if split is None else f", {split.num_prefill} of {simulation.num_replicas} replicas compute long prompts"
    print(f"{num_blocks:,} KV blocks of {args.block_size} tokens each, router {simulation.router}{apart}")


def _limits(args: EngineArgs, recorded: Recorded) -> str:
    """Return the set limits that can refuse requests which an empty engine would serve."""
    limits = {"max_queued_requests": args.max_queued_requests, "max_queued_tokens": args.max_queued_tokens}
    names = [f"{name} {value}" for name, value in limits.items() if value is not None]
    if any(request.first_token_deadline_s is not None for request in recorded.requests):
        names.append("deadlines of first tokens")
    return ", ".join(names)
