"""What `octavo simulate` takes besides engine arguments: each option once, with its documentation and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from octavo.config.fields import Arg, check_values
from octavo.errors import ConfigError
from octavo.simulate.cluster import Disaggregation
from octavo.simulate.traces import Workload

_SIMULATION, _WORKLOAD = "Simulation", "Workload"
_DEFAULTS = Workload()
DEFAULT_COST_MODEL = "h100/llama-3.1-8b"


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What is simulated, and where the results go."""

    trace: Annotated[
        str | None, Arg("File with a request per line (JSON), instead of a generated one.", group=_SIMULATION)
    ] = None
    replay: Annotated[
        str | None,
        Arg("Recording of octavo serve --record-trace; tells whether the same decisions are taken.", group=_SIMULATION),
    ] = None
    recording: Annotated[
        str | None,
        Arg(
            "Recording of octavo serve --record-trace, whose requests are simulated: with its settings where none are "
            "given here, and its steps as cost model unless one is given.",
            group=_SIMULATION,
        ),
    ] = None
    model: Annotated[
        str | None,
        Arg(
            "Model whose steps are reckoned, on --device: a hub name (only config.json is fetched), a directory, or a "
            "config.json.",
            group=_SIMULATION,
        ),
    ] = None
    device: Annotated[
        str | None,
        Arg("What the model runs on: a100, h100, h200, l4 and others, or a JSON file of your own.", group=_SIMULATION),
    ] = None
    tensor_parallel_size: Annotated[
        int, Arg("Devices that share each layer of --model.", group=_SIMULATION, ge=1, le=1024)
    ] = 1
    cost_model: Annotated[
        str | None,
        Arg(
            "What steps cost, instead of --model and --device: DEVICE/MODEL, or a JSON file such as octavo bench "
            f"calibrate writes. [default: {DEFAULT_COST_MODEL}]",
            group=_SIMULATION,
        ),
    ] = None
    replicas: Annotated[int, Arg("Engines behind the router.", group=_SIMULATION, ge=1)] = 1
    router: Annotated[str, Arg("round-robin, least-loaded or prefix-aware.", group=_SIMULATION)] = "round-robin"
    disaggregated: Annotated[
        int | None, Arg("So many of the replicas compute prompts, the others only decode.", group=_SIMULATION)
    ] = None
    transfer_bytes_per_s: Annotated[
        float, Arg("Rate at which keys and values get from the one to the other.", group=_SIMULATION, gt=0)
    ] = Disaggregation(num_prefill=1).bytes_per_s
    seed: Annotated[int, Arg("Seed of the generated requests.", group=_SIMULATION)] = 0
    processes: Annotated[
        int | None,
        Arg("Processes that share replicas, where those do not depend on each other.", group=_SIMULATION, ge=1),
    ] = None
    output: Annotated[str | None, Arg("File that gets the whole report as JSON.", group=_SIMULATION)] = None
    svg: Annotated[str | None, Arg("File that gets the picture.", group=_SIMULATION)] = None
    first_step: Annotated[
        int | None, Arg("First step that the picture of a replay shows. [default: 1]", group=_SIMULATION)
    ] = None
    num_steps: Annotated[int | None, Arg("How many it shows. [default: 400]", group=_SIMULATION)] = None
    save_trace: Annotated[str | None, Arg("File that gets the generated trace.", group=_SIMULATION)] = None

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What a generator makes; `Workload` has the limits."""

    arrivals: Annotated[str, Arg("How requests arrive: poisson, gamma, on-off or at-once.", group=_WORKLOAD)] = (
        _DEFAULTS.arrivals
    )
    num_requests: Annotated[int, Arg("Requests.", group=_WORKLOAD)] = _DEFAULTS.num_requests
    request_rate: Annotated[
        str,
        Arg(
            "Requests (conversations) a second; several, as in 1,2,4, are as many simulations.",
            group=_WORKLOAD,
        ),
    ] = f"{_DEFAULTS.request_rate:g}"
    burstiness: Annotated[
        float, Arg("With gamma: how many times as much as with poisson gaps vary.", group=_WORKLOAD)
    ] = _DEFAULTS.burstiness
    on_s: Annotated[float, Arg("With on-off: seconds with arrivals.", group=_WORKLOAD)] = _DEFAULTS.on_s
    off_s: Annotated[float, Arg("With on-off: seconds without.", group=_WORKLOAD)] = _DEFAULTS.off_s
    input_len: Annotated[float, Arg("Mean tokens of a prompt.", group=_WORKLOAD)] = _DEFAULTS.input_len
    output_len: Annotated[float, Arg("Mean tokens of an output.", group=_WORKLOAD)] = _DEFAULTS.output_len
    length_spread: Annotated[
        float, Arg("Standard deviation of the logarithm of lengths; 0 makes all alike.", group=_WORKLOAD)
    ] = _DEFAULTS.length_spread
    shared_prefix_len: Annotated[int, Arg("Tokens with which prompts begin that they share.", group=_WORKLOAD)] = (
        _DEFAULTS.shared_prefix_len
    )
    num_shared_prefixes: Annotated[int, Arg("Different ones of those.", group=_WORKLOAD)] = (
        _DEFAULTS.num_shared_prefixes
    )
    turns: Annotated[int, Arg("Requests of a conversation.", group=_WORKLOAD)] = _DEFAULTS.turns
    think_s: Annotated[float, Arg("Mean seconds from an answer to the next turn.", group=_WORKLOAD)] = _DEFAULTS.think_s
    n: Annotated[int, Arg("Sequences per request.", group=_WORKLOAD)] = _DEFAULTS.n
    best_of: Annotated[int | None, Arg("Sequences of which the best n are kept.", group=_WORKLOAD)] = None
    num_tenants: Annotated[int, Arg("Senders of requests; the k-th sends in proportion to 1/k.", group=_WORKLOAD)] = (
        _DEFAULTS.num_tenants
    )
    num_priorities: Annotated[int, Arg("Different priorities, 0 and up.", group=_WORKLOAD)] = _DEFAULTS.num_priorities
    first_token_deadline_s: Annotated[
        float | None, Arg("Seconds after its arrival in which a request's first token is due.", group=_WORKLOAD)
    ] = None
    beam_search: Annotated[bool, Arg("Search with n beams.", group=_WORKLOAD)] = False

    def __post_init__(self) -> None:
        check_values(self)

    def rates(self) -> tuple[float, ...]:
        """Return the numbers of `request_rate`. Raises ConfigError."""
        try:
            return tuple(float(text) for text in self.request_rate.split(","))
        except ValueError as error:
            raise ConfigError(
                f"request_rate is {self.request_rate!r}, expected a number, or numbers between commas"
            ) from error

    def workloads(self, max_len: int | None) -> list[Workload]:
        """Return the workload at each of the rates, of requests of at most `max_len` tokens. Raises ConfigError."""
        values: dict[str, Any] = dict(vars(self))
        values |= {"use_beam_search": values.pop("beam_search"), "max_len": max_len or _DEFAULTS.max_len}
        return [Workload(**values | {"request_rate": rate}) for rate in self.rates()]
