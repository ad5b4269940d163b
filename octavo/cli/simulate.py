"""`octavo simulate`: the scheduler and its block manager in simulated time. Needs neither model nor torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.cli.options import Given, count, number, numbers, switch, with_options, word
from octavo.config.args import EngineArgs
from octavo.config.effects import without_effect
from octavo.config.fields import arguments
from octavo.errors import ConfigError, suggestion
from octavo.platform import Platform
from octavo.simulate.cluster import Disaggregation
from octavo.simulate.cost_model import CostModel, Fitted, load_cost_model
from octavo.simulate.film import film
from octavo.simulate.raster import whole_picture
from octavo.simulate.recorded import Recorded, read_recorded, recorded_arguments, recorded_costs
from octavo.simulate.replay import Replay
from octavo.simulate.report import Run, picture, summarize, table, to_json
from octavo.simulate.router import ROUTERS
from octavo.simulate.settings import engine_settings
from octavo.simulate.simulation import Simulation
from octavo.simulate.simulation import simulate as run_simulation
from octavo.simulate.trace_file import read_trace, write_trace
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate

_DEFAULTS = Workload()
_COST_MODEL = "h100/llama-3.1-8b"
_ROUGH_FIT = 0.2
"""A median error of steps beyond which a fitted cost model is warned of."""
_KEPT = {"max_model_len", "gpu_memory_utilization"}
_NOT_SIMULATED = tuple(
    argument.name
    for argument in arguments(EngineArgs).values()
    if argument.arg.group not in ("Memory and cache", "Scheduling") and argument.name not in _KEPT
)
"""Engine arguments that decide nothing about scheduling."""


@with_options(EngineArgs, without=(*_NOT_SIMULATED, "kv_cache_memory", "kv_cache_dtype"))
def simulate(
    *,
    trace: Annotated[
        str | None, word("File with a request per line (JSON), instead of a generated one.", "Simulation")
    ] = None,
    replay: Annotated[
        str | None,
        word("Recording of octavo serve --record-trace; tells whether the same decisions are taken.", "Simulation"),
    ] = None,
    recording: Annotated[
        str | None,
        word(
            "Recording of octavo serve --record-trace, whose requests are simulated: with its settings where none are "
            "given here, and its steps as cost model unless one is given.",
            "Simulation",
        ),
    ] = None,
    cost_model: Annotated[
        str | None,
        word(
            "What steps cost: DEVICE/MODEL, or a JSON file such as octavo bench calibrate writes. "
            f"[default: {_COST_MODEL}]",
            "Simulation",
        ),
    ] = None,
    replicas: Annotated[int, count("Engines behind the router.", "Simulation")] = 1,
    router: Annotated[str, word("round-robin, least-loaded or prefix-aware.", "Simulation")] = "round-robin",
    disaggregated: Annotated[
        int | None, count("So many of the replicas compute prompts, the others only decode.", "Simulation")
    ] = None,
    transfer_bytes_per_s: Annotated[
        float, number("Rate at which keys and values get from the one to the other.", "Simulation")
    ] = Disaggregation(num_prefill=1).bytes_per_s,
    seed: Annotated[int, count("Seed of the generated requests.", "Simulation")] = 0,
    processes: Annotated[
        int | None, count("Processes that share replicas, where those do not depend on each other.", "Simulation")
    ] = None,
    output: Annotated[str | None, word("File that gets the whole report as JSON.", "Simulation")] = None,
    svg: Annotated[str | None, word("File that gets the picture.", "Simulation")] = None,
    first_step: Annotated[
        int | None, count("First step that the picture of a replay shows. [default: 1]", "Simulation")
    ] = None,
    num_steps: Annotated[int | None, count("How many it shows. [default: 400]", "Simulation")] = None,
    save_trace: Annotated[str | None, word("File that gets the generated trace.", "Simulation")] = None,
    arrivals: Annotated[
        str, word("How requests arrive: poisson, gamma, on-off or at-once.", "Workload")
    ] = _DEFAULTS.arrivals,
    num_requests: Annotated[int, count("Requests.", "Workload")] = _DEFAULTS.num_requests,
    request_rate: Annotated[
        tuple[float, ...],
        numbers("Requests (conversations) a second; several, as in 1,2,4, are as many simulations.", "Workload"),
    ] = (_DEFAULTS.request_rate,),
    burstiness: Annotated[
        float, number("With gamma: how many times as much as with poisson gaps vary.", "Workload")
    ] = _DEFAULTS.burstiness,
    on_s: Annotated[float, number("With on-off: seconds with arrivals.", "Workload")] = _DEFAULTS.on_s,
    off_s: Annotated[float, number("With on-off: seconds without.", "Workload")] = _DEFAULTS.off_s,
    input_len: Annotated[float, number("Mean tokens of a prompt.", "Workload")] = _DEFAULTS.input_len,
    output_len: Annotated[float, number("Mean tokens of an output.", "Workload")] = _DEFAULTS.output_len,
    length_spread: Annotated[
        float, number("Standard deviation of the logarithm of lengths; 0 makes all alike.", "Workload")
    ] = _DEFAULTS.length_spread,
    shared_prefix_len: Annotated[
        int, count("Tokens with which prompts begin that they share.", "Workload")
    ] = _DEFAULTS.shared_prefix_len,
    num_shared_prefixes: Annotated[int, count("Different ones of those.", "Workload")] = _DEFAULTS.num_shared_prefixes,
    turns: Annotated[int, count("Requests of a conversation.", "Workload")] = _DEFAULTS.turns,
    think_s: Annotated[float, number("Mean seconds from an answer to the next turn.", "Workload")] = _DEFAULTS.think_s,
    n: Annotated[int, count("Sequences per request.", "Workload")] = _DEFAULTS.n,
    best_of: Annotated[int | None, count("Sequences of which the best n are kept.", "Workload")] = None,
    num_tenants: Annotated[
        int, count("Senders of requests; the k-th sends in proportion to 1/k.", "Workload")
    ] = _DEFAULTS.num_tenants,
    num_priorities: Annotated[int, count("Different priorities, 0 and up.", "Workload")] = _DEFAULTS.num_priorities,
    first_token_deadline_s: Annotated[
        float | None, number("Seconds after its arrival in which a request's first token is due.", "Workload")
    ] = None,
    beam_search: Annotated[bool, switch("Search with n beams.", "Workload")] = False,
    given: Given,
) -> int:
    """Run the scheduler in simulated time: the same code that serves, over steps that a cost model times."""
    if sum(each is not None for each in (replay, recording, trace)) > 1:
        raise ConfigError("of replay, recording and trace only one can be given")
    # the rate is not among them: each of several makes a workload of its own
    generated: dict[str, Any] = {
        "arrivals": arrivals,
        "num_requests": num_requests,
        "burstiness": burstiness,
        "on_s": on_s,
        "off_s": off_s,
        "input_len": input_len,
        "output_len": output_len,
        "length_spread": length_spread,
        "shared_prefix_len": shared_prefix_len,
        "num_shared_prefixes": num_shared_prefixes,
        "turns": turns,
        "think_s": think_s,
        "n": n,
        "best_of": best_of,
        "use_beam_search": beam_search,
        "num_tenants": num_tenants,
        "num_priorities": num_priorities,
        "first_token_deadline_s": first_token_deadline_s,
    }
    for_generator = _for_generator(generated, request_rate, seed, save_trace)
    if replay is not None:
        simulated = {
            "cost_model": cost_model is not None,
            "replicas": replicas != 1,
            "router": router != "round-robin",
            "disaggregated": disaggregated is not None,
            "transfer_bytes_per_s": transfer_bytes_per_s != Disaggregation(num_prefill=1).bytes_per_s,
            "processes": processes is not None,
            "output": output is not None,
            "config": given.config is not None,
        }
        others = [*given.values, *(name for name, is_given in simulated.items() if is_given), *for_generator]
        if others:
            raise ConfigError(
                f"{others[0]} is for simulations, but replay is given, which decides as it was recorded; leave out one "
                "of them, or give recording instead of replay"
            )
    for name, value in {"first_step": first_step, "num_steps": num_steps}.items():
        if value is not None and (replay is None or svg is None):
            raise ConfigError(f"{name} is for the picture of a replay; give replay and svg too, or leave it out")
    if replay is not None:
        return _replay(replay, svg, 1 if first_step is None else first_step, 400 if num_steps is None else num_steps)
    if router not in ROUTERS:
        raise ConfigError(f"router is {router!r}, must be one of {', '.join(ROUTERS)}{suggestion(router, ROUTERS)}")
    recorded = read_recorded(recording) if recording is not None else None
    args = given.arguments(EngineArgs) if recorded is None else _arguments_over(recorded, given)
    if for_generator and (trace is not None or recording is not None):
        source = "recording" if trace is None else "trace"
        raise ConfigError(f"{for_generator[0]} is for generated requests, but {source} is given; leave out one of them")
    workload = Workload(**generated, max_len=args.max_model_len or _DEFAULTS.max_len)
    for name, value in {"replicas": replicas, "processes": processes}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    if recorded is not None and cost_model is None:
        model: CostModel = recorded_costs(f"recorded steps of {recording}", recorded)
    else:
        model = load_cost_model(cost_model or _COST_MODEL)
    if recorded is not None:
        traces = [Trace(recorded.requests)]
    else:
        traces = [read_trace(trace)] if trace is not None else _generated(workload, request_rate, seed, save_trace)
    disaggregation = None
    if disaggregated is not None:
        disaggregation = Disaggregation(num_prefill=disaggregated, bytes_per_s=_positive(transfer_bytes_per_s))
    simulation = Simulation(
        settings=engine_settings(args, model, max_model_len=args.max_model_len or _longest(traces)),
        cost_model=model,
        num_replicas=replicas,
        router=router,
        disaggregation=disaggregation,
    )
    if recorded is not None:
        left_out = f", and {recorded.num_left_out:,} that produced nothing" if recorded.num_left_out else ""
        print(f"As recorded{left_out}:\n{table(Run(summarize(recorded.outcome), recorded.outcome))}\n\nSimulated:")
    print(model.describe())
    if isinstance(model, Fitted) and model.fit_error > _ROUGH_FIT:
        print(
            f"warning: half of the measured steps are off by more than {model.fit_error:.0%}, as on a busy machine: "
            "times below are rough; measure on an idle one, or give another cost_model"
        )
    print(f"{simulation.settings.num_blocks:,} KV blocks of {args.block_size} tokens each, router {router}\n")
    has_rates = trace is None and recording is None and arrivals != "at-once"
    runs = []
    began = time.perf_counter()
    for rate, each in zip(request_rate, traces, strict=True):
        outcome = run_simulation(each, simulation, processes or Platform.detect().cores)
        runs.append(Run(summarize(outcome), outcome, rate if has_rates else None))
        print(table(runs[-1]), end="\n\n")
        if recorded is not None and runs[-1].summary.num_failed and (limits := _limits(args, recorded)):
            print(f"requests are refused by limits of the queue, the recorded ones unless given here: {limits}\n")
    elapsed = time.perf_counter() - began
    print(f"simulated in {elapsed:,.1f} s", file=sys.stderr)
    if output is not None:
        body = {"cost_model": msgspec.to_builtins(model), "elapsed_s": elapsed, "runs": [to_json(run) for run in runs]}
        _write("output", output, msgspec.json.format(msgspec.json.encode(body)))
    if svg is not None:
        title = f"{runs[-1].summary.num_requests:,} requests, {f'{replicas} × ' if replicas > 1 else ''}{model.name}"
        _write("svg", svg, picture(title, runs).encode())
    return 0


def _arguments_over(recorded: Recorded, given: Given) -> EngineArgs:
    """What was recorded, but for what is given and for what that leaves without effect."""
    values = recorded_arguments(recorded)
    idle = without_effect(Given(given.config, values | given.values).arguments(EngineArgs))
    kept = {name: value for name, value in values.items() if name not in idle}
    return Given(given.config, kept | given.values).arguments(EngineArgs)


def _generated(workload: Workload, rates: Sequence[float], seed: int, save_to: str | None) -> list[Trace]:
    requests: list[TraceRequest] = []
    traces = []
    for rate in rates:
        requests = generate(msgspec.structs.replace(workload, request_rate=rate), seed)
        traces.append(Trace(requests))
    if save_to is not None:
        write_trace(save_to, requests)
    return traces


def _for_generator(generated: dict[str, Any], rates: Sequence[float], seed: int, save_trace: str | None) -> list[str]:
    """Names of the options that were given, and that only a generator is told."""
    changed = [name for name, value in generated.items() if value != getattr(_DEFAULTS, name)]
    others = {
        "request_rate": list(rates) != [_DEFAULTS.request_rate],
        "seed": seed != 0,
        "save_trace": save_trace is not None,
    }
    names = [*changed, *(name for name, is_given in others.items() if is_given)]
    return ["beam_search" if name == "use_beam_search" else name for name in names]


def _limits(args: EngineArgs, recorded: Recorded) -> str:
    """What refuses requests that an empty engine would serve."""
    limits = {"max_queued_requests": args.max_queued_requests, "max_queued_tokens": args.max_queued_tokens}
    names = [f"{name} {value}" for name, value in limits.items() if value is not None]
    if any(request.first_token_deadline_s is not None for request in recorded.requests):
        names.append("deadlines of first tokens")
    return ", ".join(names)


def _longest(traces: Sequence[Trace]) -> int:
    return max(request.prompt_len + request.output_len for trace in traces for request in trace.requests)


def _positive(bytes_per_s: float) -> float:
    if not bytes_per_s > 0:
        raise ConfigError(f"transfer_bytes_per_s is {bytes_per_s}, must be greater than 0")
    return bytes_per_s


def _replay(path: str, svg: str | None, first_step: int, num_steps: int) -> int:
    result = Replay(path).run()
    stats = result.stats
    print(
        f"{result.num_requests:,} requests, {result.num_steps:,} steps, {stats.num_generated_tokens:,} tokens, "
        f"{stats.num_preemptions:,} preemptions, {stats.num_cached_tokens:,} tokens found in the cache"
    )
    if result.first_difference is None:
        print("every step is the recorded one")
        if svg is not None:
            _write("svg", svg, whole_picture(film(path, first_step, num_steps)).encode())
        return 0
    print(f"step {result.first_difference:,} is another than the recorded one: this version decides otherwise")
    return 1


def _write(name: str, path: str, body: bytes) -> None:
    try:
        Path(path).expanduser().write_bytes(body)
    except OSError as error:
        raise ConfigError(f"{name} is {path!r}, which cannot be written: {error.strerror}") from error
