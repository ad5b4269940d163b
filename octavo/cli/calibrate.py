"""`octavo bench calibrate`: a cost model for `octavo simulate`, fitted to steps of the engine on this machine.

The engine runs a grid of batches; every step's work and time are kept, the coefficients are those of the least squared
relative error. Then a batch of mixed lengths, which is not in the grid, is run and simulated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from octavo.cli.bench import load, positive
from octavo.cli.options import Given, count, counts, with_options, word
from octavo.cli.report import report
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.core.step import SchedulerOutput
from octavo.engine.block_moves import BlockMoveRates
from octavo.errors import ConfigError
from octavo.simulate.cost_model import FEATURES, Check, Fitted, MeasuredStep, StepWork, fit, work_of
from octavo.simulate.settings import offline_seconds
from octavo.simulate.traces import Workload, generate

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM

_OUTPUT_LEN = 24
_CHECK = Workload(arrivals="at-once", num_requests=48, input_len=96, output_len=48, length_spread=0.6)


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def calibrate(
    *,
    output: Annotated[str | None, word("File that gets the cost model.", "Benchmark")] = None,
    engine_config: Annotated[
        str | None,
        word("File (YAML) that gets the measured rates as engine arguments, for octavo serve --config.", "Benchmark"),
    ] = None,
    batch_sizes: Annotated[tuple[int, ...], counts("Requests that run together, one grid point each.", "Benchmark")] = (
        1,
        4,
        16,
        32,
        64,
    ),
    input_lens: Annotated[tuple[int, ...], counts("Tokens of their prompts.", "Benchmark")] = (16, 128, 512),
    repetitions: Annotated[int, count("Times to measure; the least time of each step counts.", "Benchmark")] = 5,
    given: Given,
) -> int:
    """Fit a cost model for octavo simulate to steps of the engine on this machine."""
    positive(batch_sizes=min(batch_sizes), input_lens=min(input_lens), repetitions=repetitions)
    llm = load(given)
    model, num_steps = fitted(llm, batch_sizes, input_lens, repetitions)
    assert model.check is not None
    if output is not None:
        write("output", output, msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    rates = {"prefill_tokens_per_s": model.prefill_tokens_per_s, "swap_bytes_per_s": model.swap_bytes_per_s}
    if engine_config is not None:
        write("engine_config", engine_config, "".join(f"{name}: {rate:.6g}\n" for name, rate in rates.items()).encode())
    report(
        "calibrate",
        {"model": llm.config.model.name, "batch_sizes": list(batch_sizes), "input_lens": list(input_lens)},
        {
            "num_steps": num_steps,
            **{name: getattr(model, name) for name in FEATURES},
            "copy_bytes_per_s": model.copy_bytes_per_s,
            **rates,
            "fit_error": model.fit_error,
            "measured_tokens_per_s": model.check.measured_tokens_per_s,
            "predicted_tokens_per_s": model.check.predicted_tokens_per_s,
            "prediction_error": model.check.error,
        },
    )
    return 0


def fitted(llm: LLM, batch_sizes: Sequence[int], input_lens: Sequence[int], repetitions: int) -> tuple[Fitted, int]:
    """A cost model of this engine, and the number of steps that it was fitted to. Raises ConfigError."""
    ready, config = llm.engine.ready, llm.config
    longest = ready.max_model_len - _OUTPUT_LEN
    if longest < 4:
        raise ConfigError(
            f"max_model_len is {ready.max_model_len}, must be at least {_OUTPUT_LEN + 4} here: prompts of a few "
            f"tokens are followed by {_OUTPUT_LEN}"
        )
    widest = config.scheduler.max_num_seqs
    grid = dict.fromkeys((min(size, widest), min(length, longest)) for length in input_lens for size in batch_sizes)
    mixed = _mixed_batch(longest)
    *batches, checked = measure(
        llm,
        [*(Batch([length] * size, [_OUTPUT_LEN] * size) for size, length in grid), mixed],
        repetitions,
    )
    steps = [step for batch in batches for step in batch.steps]
    coefficients, fit_error = fit(steps)
    moves = msgspec.convert(llm.engine.call("measure_block_moves"), BlockMoveRates)
    model = Fitted(
        name=f"{config.model.name} on this machine",
        kv_bytes_per_token=ready.kv_block_bytes / ready.block_size,
        num_kv_tokens=ready.num_blocks * ready.block_size,
        # where there is no swap space nothing is swapped
        swap_bytes_per_s=moves.swap_bytes_per_s or moves.copy_bytes_per_s,
        copy_bytes_per_s=moves.copy_bytes_per_s,
        fit_error=fit_error,
        step_s=coefficients["step_s"],
        sequence_s=coefficients["sequence_s"],
        prefill_token_s=coefficients["prefill_token_s"],
        context_token_s=coefficients["context_token_s"],
        pair_s=coefficients["pair_s"],
    )
    num_tokens = min(max(input_lens), longest, config.scheduler.max_num_batched_tokens)
    prompt = StepWork(1, num_tokens, num_tokens, 0, num_tokens * (num_tokens + 1) // 2)
    rate = num_tokens / model.step_seconds(prompt, ready.block_size)
    model = msgspec.structs.replace(model, prefill_tokens_per_s=rate)
    return msgspec.structs.replace(model, check=check(llm, model, mixed, checked)), len(steps)


class Batch(NamedTuple):
    """Requests that are handed in at once, by their lengths."""

    input_lens: Sequence[int]
    output_lens: Sequence[int]


class MeasuredBatch(NamedTuple):
    """A batch's steps, and the seconds that it took besides them."""

    steps: list[MeasuredStep]
    besides_s: float


def measure(llm: LLM, batches: Sequence[Batch], repetitions: int) -> list[MeasuredBatch]:
    """Every repetition of a batch has the same steps, so each one's time is the least: whatever else runs on the
    machine only adds to it. Batches take turns, so that a busy moment does not meet all repetitions of one."""
    found: list[MeasuredBatch | None] = [None] * len(batches)
    for repetition in range(repetitions + 1):
        for place, batch in enumerate(batches):
            llm.engine.call("reset_prefix_cache")
            run = _run(llm, batch, place)
            if repetition > 0:  # the first does not count
                found[place] = _lesser(found[place], run)
    return [batch for batch in found if batch is not None]


def _run(llm: LLM, batch: Batch, seed: int) -> MeasuredBatch:
    prompts = _prompts(llm, batch.input_lens, seed)
    params = [_greedy(output_len) for output_len in batch.output_lens]
    with _watched(llm.engine) as steps:
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - began
    return MeasuredBatch(steps, elapsed - sum(step.seconds for step in steps))


def _lesser(one: MeasuredBatch | None, other: MeasuredBatch) -> MeasuredBatch:
    if one is None:
        return other
    if [step.work for step in one.steps] != [step.work for step in other.steps]:
        raise ConfigError("the same batch ran in different steps; calibrate with a cache that is large enough for it")
    steps = [MeasuredStep(a.work, min(a.seconds, b.seconds)) for a, b in zip(one.steps, other.steps, strict=True)]
    return MeasuredBatch(steps, min(one.besides_s, other.besides_s))


def _mixed_batch(longest: int) -> Batch:
    requests = generate(msgspec.structs.replace(_CHECK, max_len=min(longest, _CHECK.max_len)), seed=1)
    return Batch([request.prompt_len for request in requests], [request.output_len for request in requests])


def check(llm: LLM, model: Fitted, batch: Batch, measured: MeasuredBatch) -> Check:
    """Tokens per second of a batch as measured, and as the simulation of it says."""
    measured_s = sum(step.seconds for step in measured.steps) + measured.besides_s
    lengths = list(zip(batch.input_lens, batch.output_lens, strict=True))
    config = llm.config
    predicted_s = offline_seconds(model, config.cache, config.scheduler, llm.engine.ready.num_blocks, lengths)
    num_tokens = sum(batch.output_lens)
    return Check(measured_tokens_per_s=num_tokens / measured_s, predicted_tokens_per_s=num_tokens / predicted_s)


def _prompts(llm: LLM, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random tokens. The first ones differ as far as there are different ones: no prompt is found in the cache."""
    source = random.Random(seed)
    vocab_size = llm.config.model.vocab_size
    return [
        [number % vocab_size, *(source.randrange(vocab_size) for _ in range(length - 1))]
        for number, length in enumerate(lengths)
    ]


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


def write(name: str, path: str, body: bytes) -> None:
    """Write the file that option `name` asked for. Raises ConfigError."""
    try:
        Path(path).expanduser().write_bytes(body)
    except OSError as error:
        raise ConfigError(f"{name} is {path!r}, which cannot be written: {error.strerror}") from error
