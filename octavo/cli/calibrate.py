"""`octavo bench calibrate`: a cost model for `octavo simulate`, fitted to steps of the engine on this machine.

The engine runs a grid of batches; every step's work and time are kept, the coefficients are those of the least squared
relative error. Then a batch of mixed lengths, which is not in the grid, is run and simulated.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from octavo.cli.bench import load, positive
from octavo.cli.options import Given, count, counts, with_options, word
from octavo.cli.report import report
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.core.step import SchedulerOutput
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cost_model import Check, Fitted, MeasuredStep, fit, work_of
from octavo.simulate.simulation import Simulation, simulate
from octavo.simulate.traces import Trace, TraceRequest, Workload, generate

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM

_OUTPUT_LEN = 24
_CHECK = Workload(arrivals="at-once", num_requests=48, input_len=96, output_len=48, length_spread=0.6)


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def calibrate(
    *,
    output: Annotated[str | None, word("File that gets the cost model.", "Benchmark")] = None,
    batch_sizes: Annotated[tuple[int, ...], counts("Requests that run together, one grid point each.", "Benchmark")] = (
        1,
        4,
        16,
        32,
        64,
    ),
    input_lens: Annotated[tuple[int, ...], counts("Tokens of their prompts.", "Benchmark")] = (16, 128, 512),
    repetitions: Annotated[int, count("Times to measure; the median of each step counts.", "Benchmark")] = 3,
    given: Given,
) -> int:
    """Fit a cost model for octavo simulate to steps of the engine on this machine."""
    positive(batch_sizes=min(batch_sizes), input_lens=min(input_lens), repetitions=repetitions)
    llm = load(given)
    engine = llm.engine
    longest = engine.ready.max_model_len - _OUTPUT_LEN
    widest = llm.config.scheduler.max_num_seqs
    grid = [(min(size, widest), min(length, longest)) for length in input_lens for size in batch_sizes]
    steps = [step for size, length in dict.fromkeys(grid) for step in measure(llm, [length] * size, repetitions)]
    coefficients, fit_error = fit(steps)
    ready = engine.ready
    model = Fitted(
        name=f"{llm.config.model.name} on this machine",
        **coefficients,
        kv_bytes_per_token=ready.kv_block_bytes / ready.block_size,
        num_kv_tokens=ready.num_blocks * ready.block_size,
        fit_error=fit_error,
    )
    model = msgspec.structs.replace(model, check=check(llm, model, repetitions))
    assert model.check is not None
    if output is not None:
        _write(output, model)
    report(
        "calibrate",
        {"model": llm.config.model.name, "batch_sizes": list(batch_sizes), "input_lens": list(input_lens)},
        {
            "num_steps": len(steps),
            **coefficients,
            "fit_error": fit_error,
            "measured_tokens_per_s": model.check.measured_tokens_per_s,
            "predicted_tokens_per_s": model.check.predicted_tokens_per_s,
            "prediction_error": model.check.error,
        },
    )
    return 0


def measure(llm: LLM, input_lens: Sequence[int], repetitions: int) -> list[MeasuredStep]:
    """The steps of a batch with these prompts; every repetition has the same, so each time is a median."""
    params = _greedy(_OUTPUT_LEN)
    runs: list[list[MeasuredStep]] = []
    for repetition in range(repetitions + 1):
        with _watched(llm.engine) as steps:
            llm.generate(_prompts(llm, input_lens, repetition), params, use_tqdm=False)
        if repetition > 0:  # the first does not count
            runs.append(steps)
    if len({tuple(step.work for step in run) for run in runs}) > 1:
        raise ConfigError("the same batch ran in different steps; calibrate with a cache that is large enough for it")
    return [
        MeasuredStep(same[0].work, statistics.median(step.seconds for step in same)) for same in zip(*runs, strict=True)
    ]


def check(llm: LLM, model: Fitted, repetitions: int) -> Check:
    """A batch of mixed lengths: tokens per second as measured, and as the simulation of it says."""
    room = llm.engine.ready.max_model_len
    workload = msgspec.structs.replace(_CHECK, max_len=room) if room < _CHECK.max_len else _CHECK
    requests = generate(workload, seed=1)
    num_tokens = sum(request.output_len for request in requests)
    seconds = [_run(llm, requests, repetition) for repetition in range(repetitions + 1)][1:]
    settings = SchedulerSettings(
        cache=llm.config.cache, scheduler=llm.config.scheduler, num_blocks=llm.engine.ready.num_blocks
    )
    outcome = simulate(Trace(requests), Simulation(settings=settings, cost_model=model))
    predicted = max(record.finished_s for record in outcome.records)
    return Check(
        measured_tokens_per_s=num_tokens / statistics.median(seconds), predicted_tokens_per_s=num_tokens / predicted
    )


def _run(llm: LLM, requests: Sequence[TraceRequest], seed: int) -> float:
    prompts = _prompts(llm, [request.prompt_len for request in requests], seed)
    params = [_greedy(request.output_len) for request in requests]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def _prompts(llm: LLM, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random tokens, other ones for every seed: nothing is found in the prefix cache."""
    source = random.Random(seed)
    vocab_size = llm.config.model.vocab_size
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=output_len, ignore_eos=True, temperature=0, detokenize=False, output_kind=OutputKind.FINAL_ONLY
    )


@contextmanager
def _watched(engine: LLMEngine) -> Iterator[list[MeasuredStep]]:
    """Inside, the work and the time of every step that computes something are written down."""
    steps: list[MeasuredStep] = []
    planned: list[SchedulerOutput] = []
    scheduler = next(seam.owner for seam in engine.seams().parts if seam.method == "schedule")
    schedule: Callable[[float], SchedulerOutput | None] = scheduler.schedule  # type: ignore[attr-defined]
    step = engine.step

    def remembered_schedule(now: float) -> SchedulerOutput | None:
        plan = schedule(now)
        if plan is not None:
            planned.append(plan)
        return plan

    def timed_step() -> object:
        began = time.perf_counter()
        outputs = step()
        seconds = time.perf_counter() - began
        # with steps in flight one begins what another ends: only a step that did both by itself has a time
        if len(planned) == 1:
            steps.append(MeasuredStep(work_of(planned[0]), seconds))
        planned.clear()
        return outputs

    setattr(scheduler, "schedule", remembered_schedule)  # noqa: B010
    setattr(engine, "step", timed_step)  # noqa: B010
    try:
        yield steps
    finally:
        delattr(scheduler, "schedule")
        delattr(engine, "step")


def _write(path: str, model: Fitted) -> None:
    try:
        Path(path).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    except OSError as error:
        raise ConfigError(f"output is {path!r}, which cannot be written: {error.strerror}") from error
