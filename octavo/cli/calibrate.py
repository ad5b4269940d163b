"""`octavo bench calibrate`: a cost model for `octavo simulate`, fitted to steps of the engine on this machine.

The engine runs a grid of batches, and requests that come one after the other; every step's work and time are kept, the
coefficients are those of the least squared relative error. Then loads of several kinds, which were not fitted to, are
run and simulated.
"""

from __future__ import annotations

import dataclasses
import random
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from octavo.cli.bench import greedy, load
from octavo.cli.live import compare, core_of, simulation_of, standard_loads
from octavo.cli.options import Given, whole_numbers, with_options
from octavo.cli.report import check_file, report, write_file
from octavo.config.args import EngineArgs
from octavo.config.fields import Arguments, arg
from octavo.core.cache_limits import CacheLimits
from octavo.core.step import BlockCopy, BlockOps, ModelRunnerOutput, SchedulerOutput
from octavo.errors import ConfigError
from octavo.simulate.comparison import check_of, table
from octavo.simulate.cost_model import COPIED_BLOCK, FEATURES, Fitted, MeasuredStep, fit, work_of
from octavo.simulate.traces import Workload, generate

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM

_OUTPUT_LEN = 24
_MOST_PROMPT_TOKENS = 1 << 14
"""Prompt tokens of the largest batch of the grid: larger ones take long and add nothing to the fit."""
_CURVE_TOKENS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_CURVE_INPUT_LEN = 16
_NUM_CHECKED = 40
"""Requests of each load that is held out of the fit."""
_MIXED = Workload(arrivals="at-once", num_requests=48, input_len=96, output_len=48, length_spread=0.6)


class CalibrateOptions(Arguments, heading="Benchmark"):
    """What `octavo bench calibrate` measures, and where the results go."""

    output: str | None = arg(None, "File that gets the cost model.")
    engine_config: str | None = arg(
        None, "File (YAML) that gets the measured rates as engine arguments, for octavo serve --config."
    )
    batch_sizes: str = arg("1,4,16,64,256", "Numbers of requests that run together, between commas.")
    input_lens: str = arg("16,128,512", "Numbers of tokens of their prompts, between commas.")
    repetitions: int = arg(
        5, "How often to measure; the time of a step is its median, without interrupted measurements.", ge=1
    )

    def grid(self) -> Grid:
        """Return the batches to measure. Raises ConfigError."""
        sizes, lengths = whole_numbers("batch_sizes", self.batch_sizes), whole_numbers("input_lens", self.input_lens)
        return Grid(sizes, lengths, self.repetitions)


class Grid(NamedTuple):
    """Batch sizes and prompt lengths that are measured, and how often."""

    batch_sizes: Sequence[int]
    input_lens: Sequence[int]
    repetitions: int


@with_options(CalibrateOptions, EngineArgs)
def calibrate(*, given: Given) -> None:
    """Fit a cost model for octavo simulate to steps of the engine on this machine."""
    options = given.own(CalibrateOptions)
    check_file("output", options.output)
    check_file("engine_config", options.engine_config)
    grid = options.grid()
    speculative = dict(given.arguments(EngineArgs).speculative_config or {})
    # guesses would change what the steps compute
    llm = load(Given(given.config, given.values | {"speculative_config": None}), as_served=True)
    curve = decode_curve(llm, grid.repetitions) if speculative else []
    model, num_steps = fitted(llm, grid)
    simulation = simulation_of(llm, model)
    comparisons = compare(llm, simulation, standard_loads(llm, simulation, _NUM_CHECKED), repetitions=1)
    model = msgspec.structs.replace(model, checks=tuple(map(check_of, comparisons)))
    print(model.describe(), file=sys.stderr)
    print(table(comparisons), file=sys.stderr)
    write_file("output", options.output, msgspec.json.format(msgspec.json.encode(model)) + b"\n")
    rates = {"prefill_tokens_per_s": model.prefill_tokens_per_s, "swap_bytes_per_s": model.swap_bytes_per_s}
    if options.engine_config is not None:
        lines = [f"{name}: {rate:.6g}\n" for name, rate in rates.items()]
        if speculative:
            value = msgspec.json.encode(speculative | {"step_ms": curve}).decode()
            lines.append(f"speculative_config: {value}\n")
        write_file("engine_config", options.engine_config, "".join(lines).encode())
    report(
        "calibrate",
        {"model": llm.config.model.name, "batch_sizes": grid.batch_sizes, "input_lens": grid.input_lens},
        {
            "num_steps": num_steps,
            **{name: getattr(model, name) for name in FEATURES},
            "copy_bytes_per_s": model.copy_bytes_per_s,
            **rates,
            "fit_error": model.fit_error,
            "interrupted_share": model.interrupted_share,
            "repetition_spread": model.repetition_spread,
            "checks": msgspec.to_builtins(model.checks),
            **({"step_ms": curve} if curve else {}),
        },
    )


def fitted(llm: LLM, grid: Grid, clock: Callable[[], float] = time.perf_counter) -> tuple[Fitted, int]:
    """Return a cost model of this engine, and the number of steps that it was fitted to. Raises ConfigError."""
    ready, config = llm.engine.ready, llm.config
    longest = ready.max_model_len - _OUTPUT_LEN
    if longest < 4:
        raise ConfigError(
            f"max_model_len is {ready.max_model_len}, must be at least {_OUTPUT_LEN + 4} here: prompts of a few "
            f"tokens are followed by {_OUTPUT_LEN}"
        )
    widest = config.scheduler.max_num_seqs
    most_tokens = max(_MOST_PROMPT_TOKENS, min(grid.batch_sizes) * min(grid.input_lens))
    shapes = dict.fromkeys(
        (min(size, widest), min(length, longest))
        for length in grid.input_lens
        for size in grid.batch_sizes
        if size * length <= most_tokens
    )
    at_once = [Batch([length] * size, [_OUTPUT_LEN] * size) for size, length in shapes]
    timed = measure(llm, [*at_once, _one_by_one(longest)], grid.repetitions, clock)
    steps = [MeasuredStep(each[0].step.work, _typical_seconds(each)) for each in timed]
    coefficients, fit_error = fit(steps)
    del coefficients[COPIED_BLOCK]  # measured below
    core = core_of(llm.engine)
    core.reset_prefix_cache()
    moves = measure_block_moves(core.executor.submit, ready.cache)
    model = Fitted(
        name=f"{config.model.name} on this machine",
        kv_bytes_per_token=ready.cache.block_bytes / ready.cache.block_size,
        num_kv_tokens=ready.cache.num_tokens,
        # where there is no swap space nothing is swapped
        swap_bytes_per_s=moves.swap_bytes_per_s or moves.copy_bytes_per_s,
        copy_bytes_per_s=moves.copy_bytes_per_s,
        sliding_window=ready.cache.window,
        fit_error=fit_error,
        interrupted_share=statistics.mean(step.was_interrupted for each in timed for step in each),
        repetition_spread=statistics.median(_spread(each) for each in timed),
        **coefficients,
    )
    num_tokens = min(max(grid.input_lens), longest, config.scheduler.max_num_batched_tokens)
    return model.with_prefill_rate(num_tokens, ready.cache.block_size), len(steps)


def decode_curve(llm: LLM, repetitions: int) -> list[tuple[int, float]]:
    """Return (tokens, milliseconds) of steps that decode so many tokens, for the choice of how many guesses pay."""
    widest = min(llm.config.scheduler.max_num_seqs, llm.engine.ready.max_model_len)
    sizes = [size for size in _CURVE_TOKENS if size <= widest]
    length = min(_CURVE_INPUT_LEN, llm.engine.ready.max_model_len - _OUTPUT_LEN)
    batches = [Batch([length] * size, [_OUTPUT_LEN] * size) for size in sizes]
    times: dict[int, list[float]] = {}
    for each in measure(llm, batches, repetitions):
        work = each[0].step.work
        if not work.num_prefill_tokens:
            times.setdefault(work.num_tokens, []).append(_typical_seconds(each))
    found, least = [], 0.0
    for size in sizes:
        # more tokens take no less time: what is measured otherwise is noise
        least = max(least, 1e3 * statistics.median(times[size]))
        found.append((size, round(least, 3)))
    return found


class Batch(NamedTuple):
    """Requests by their lengths. They are added at once, or `steps_between` steps after one another."""

    input_lens: Sequence[int]
    output_lens: Sequence[int]
    steps_between: int = 0


class TimedStep(NamedTuple):
    """A step, and whether another program got the processor meanwhile."""

    step: MeasuredStep
    was_interrupted: bool


def measure(
    llm: LLM, batches: Sequence[Batch], repetitions: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[TimedStep]]:
    """Return each step of the batches with its repetitions; every repetition of a batch has the same steps.

    Batches take turns, so that a busy moment of the machine does not meet all repetitions of one.
    """
    found: list[list[list[TimedStep]]] = [[] for _ in batches]
    with _whole_prompts(llm.engine):
        for repetition in range(repetitions + 1):
            for place, batch in enumerate(batches):
                llm.engine.call("reset_prefix_cache")
                run = _run(llm, batch, place, clock)
                if repetition > 0:  # the first does not count
                    found[place].append(run)
    return [step for runs in found for step in _repeated(runs)]


def _run(llm: LLM, batch: Batch, seed: int, clock: Callable[[], float]) -> list[TimedStep]:
    engine = llm.engine
    waiting = deque(zip(_prompts(llm, batch.input_lens, seed), map(greedy, batch.output_lens), strict=True))
    steps: list[TimedStep] = []
    num_steps = 0
    with engine.timed_steps() as times:
        while waiting or engine.has_unfinished_requests():
            while waiting and num_steps >= batch.steps_between * (len(batch.input_lens) - len(waiting)):
                prompt, params = waiting.popleft()
                engine.add_request(str(len(waiting)), prompt, params)
            interruptions, began = _num_interruptions(), clock()
            engine.step()
            seconds, was_interrupted = clock() - began, _num_interruptions() > interruptions
            planned = [step for each in times for step in each.planned]
            # with steps in flight one begins what another ends: only a step that did both by itself has a time
            if len(planned) == 1:
                work = work_of(planned[0], engine.ready.cache.window)
                steps.append(TimedStep(MeasuredStep(work, seconds), was_interrupted))
            times.clear()
            num_steps += 1
    return steps


def _repeated(runs: Sequence[Sequence[TimedStep]]) -> list[list[TimedStep]]:
    works = [each.step.work for each in runs[0]]
    if any([each.step.work for each in run] != works for run in runs):
        raise ConfigError(
            "the same batch ran in different steps; calibrate with a cache that is large enough for it, and with "
            "octavo bench validate give the file as cost_model"
        )
    return [[run[place] for run in runs] for place in range(len(works))]


def _typical_seconds(repetitions: Sequence[TimedStep]) -> float:
    """Return the median of the uninterrupted repetitions; where there are none, the shortest of all."""
    whole = [each.step.seconds for each in repetitions if not each.was_interrupted]
    return statistics.median(whole) if whole else min(each.step.seconds for each in repetitions)


def _spread(repetitions: Sequence[TimedStep]) -> float:
    seconds = [each.step.seconds for each in repetitions]
    return max(seconds) / min(seconds) - 1


def _one_by_one(longest: int) -> Batch:
    """Return a batch whose steps have few rows, some of them a prompt beside decoding rows."""
    requests = generate(dataclasses.replace(_MIXED, max_len=min(longest, _MIXED.max_len)), seed=2)
    return Batch([each.prompt_len for each in requests], [each.output_len for each in requests], steps_between=5)


def _prompts(llm: LLM, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return random tokens. The first ones differ as far as the vocabulary allows: the cache finds no prompt."""
    source = random.Random(seed)
    vocab_size = llm.config.model.vocab_size
    return [
        [number % vocab_size, *(source.randrange(vocab_size) for _ in range(length - 1))]
        for number, length in enumerate(lengths)
    ]


@contextmanager
def _whole_prompts(engine: LLMEngine) -> Iterator[None]:
    """Inside, no prompt is cut to keep a step short: the pieces would differ from repetition to repetition."""
    pace = core_of(engine).scheduler.rates.pace
    before, pace.target_step_s = pace.target_step_s, 0.0
    try:
        yield
    finally:
        pace.target_step_s = before


def _num_interruptions() -> int:
    """Return how often another program took the processor of a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


Submit = Callable[[SchedulerOutput], Future[ModelRunnerOutput]]

_MOVE_REPETITIONS: Final = 7
_MOST_MOVED_BLOCKS: Final = 256


class BlockMoveRates(NamedTuple):
    """Bytes of keys and values per second: between device and host (None without swap space), and within the device."""

    swap_bytes_per_s: float | None
    copy_bytes_per_s: float


def measure_block_moves(
    submit: Submit, limits: CacheLimits, clock: Callable[[], float] = time.perf_counter
) -> BlockMoveRates:
    """Return the rates of the executor whose `submit` this is, without the other costs of a step.

    They are measured in the first cache group; the content of its blocks is lost, so no request may run.
    """
    num_blocks, block_bytes = limits.groups[0].num_blocks, limits.groups[0].block_bytes
    copied = max(1, min(num_blocks // 2, _MOST_MOVED_BLOCKS))
    copies = [BlockCopy(1 + i, 1 + (copied + i) % num_blocks) for i in range(copied)]
    swapped = min(num_blocks, limits.groups[0].num_host_blocks, _MOST_MOVED_BLOCKS)
    moves = [BlockCopy(1 + i, 1 + i) for i in range(swapped)]
    idle, copy, swap = (
        _least_seconds(submit, ops, clock)
        for ops in (BlockOps(), BlockOps(copies=copies), BlockOps(swap_outs=moves, swap_ins=moves))
    )
    return BlockMoveRates(
        swap_bytes_per_s=_rate(2 * swapped * block_bytes, swap - idle) if swapped else None,
        copy_bytes_per_s=_rate(copied * block_bytes, copy - idle),
    )


def _rate(num_bytes: int, seconds: float) -> float:
    # the clock cannot see less than this
    return num_bytes / max(seconds, 1e-7)


def _least_seconds(submit: Submit, ops: BlockOps, clock: Callable[[], float]) -> float:
    """Return the least seconds of a step: other programs only add to them, and the first step touches new memory."""
    step = SchedulerOutput(step_id=-1, new_sequences=[], rows=[], finished_ids=[], block_ops=ops)
    seconds = []
    for _ in range(_MOVE_REPETITIONS):
        began = clock()
        submit(step).result()
        seconds.append(clock() - began)
    return min(seconds[1:])
