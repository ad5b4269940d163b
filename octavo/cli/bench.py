"""`octavo bench throughput | latency | startup`: what was measured, on what, and one line of JSON.

Prompts are random token ids, and generation goes on after an end-of-sequence token: every run does the same work.
"""

from __future__ import annotations

import dataclasses
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.cli.options import Given, whole_numbers, with_options
from octavo.cli.report import report
from octavo.cli.start import log_quietly
from octavo.config.args import EngineArgs
from octavo.config.fields import Arguments, arg
from octavo.core.messages import StepTimes
from octavo.core.process.processes import python
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.core.step_times import PARTS, PartTime
from octavo.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from octavo.llm import LLM


class LoadOptions(Arguments, heading="Benchmark"):
    """Lengths of requests, and how often they are measured."""

    input_len: int = arg(128, "Tokens of each prompt.", ge=1)
    output_len: int = arg(64, "Tokens to generate for each prompt.", ge=1)
    repetitions: int = arg(3, "How often to measure; the result is the median.", ge=1)


class ThroughputOptions(LoadOptions):
    """What `octavo bench throughput` measures."""

    num_prompts: int = arg(64, "Requests that are added at once.", ge=1)


class LatencyOptions(LoadOptions):
    """What `octavo bench latency` measures."""

    batch_size: str = arg(
        "1", "Requests that run together; with several numbers, as in 1,64, each is measured in a run of its own."
    )
    repetitions: int = arg(5, "How often to measure; the result is the median.", ge=1)
    breakdown: bool = arg(False, "Also show where the time of a decode step goes, and how much of it is not kernels.")


class StartupOptions(Arguments, heading="Benchmark"):
    """What `octavo bench startup` measures."""

    repetitions: int = arg(3, "How often to measure; the result is the median.", ge=1)


@with_options(ThroughputOptions, EngineArgs)
def throughput(*, given: Given) -> None:
    """Tokens per second of many requests that are there at once."""
    options = given.own(ThroughputOptions)
    llm = load(given)
    seconds = _measure(llm, random.Random(0), options, options.num_prompts)
    median = statistics.median(seconds)
    num_prompts, output_len = options.num_prompts, options.output_len
    _report(
        "throughput",
        given,
        vars(options),
        {
            "elapsed_s": median,
            "requests_per_s": num_prompts / median,
            "output_tokens_per_s": num_prompts * output_len / median,
            "total_tokens_per_s": num_prompts * (options.input_len + output_len) / median,
            "all_elapsed_s": seconds,
        },
    )


@with_options(LatencyOptions, EngineArgs)
def latency(*, given: Given) -> None:
    """Seconds that one batch takes from prompt to last token, and per token after the first."""
    options = given.own(LatencyOptions)
    batch_sizes = whole_numbers("batch_size", options.batch_size)
    if options.breakdown and options.output_len < 8:
        raise ConfigError(
            f"output_len is {options.output_len}, must be at least 8 with breakdown: medians need some steps"
        )
    llm = load(given)
    source = random.Random(0)
    for size in batch_sizes:
        _latency(llm, source, given, options, size)


def _latency(llm: LLM, source: random.Random, given: Given, options: LatencyOptions, batch_size: int) -> None:
    first = statistics.median(_measure(llm, source, dataclasses.replace(options, output_len=1), batch_size))
    seconds = _measure(llm, source, options, batch_size)
    whole, output_len = statistics.median(seconds), options.output_len
    per_token = (whole - first) / (output_len - 1) if output_len > 1 else 0.0
    result = {"elapsed_s": whole, "first_token_s": first, "per_token_s": per_token, "all_elapsed_s": seconds}
    if options.breakdown:
        with llm.engine.timed_steps() as steps:
            _measure(llm, source, options, batch_size, detokenize=True)
        medians = medians_us(steps, batch_size)
        num_steps = sum(is_plain_decode(step, batch_size) for step in steps)
        result |= {"breakdown_steps": num_steps, "breakdown_us": medians}
        print(part_table(medians), file=sys.stderr)
    workload = {"input_len": options.input_len, "output_len": output_len, "repetitions": options.repetitions}
    _report("latency", given, {"batch_size": batch_size, **workload}, result)


@with_options(StartupOptions, EngineArgs)
def startup(*, given: Given) -> None:
    """Seconds from starting a process to its first token, what they cost the processors, and the memory at the peak."""
    repetitions = given.own(StartupOptions).repetitions
    args = given.arguments(EngineArgs)
    samples = [_start_once(args) for _ in range(repetitions)]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    _report("startup", given, {"repetitions": repetitions}, medians | {"all": samples})


_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
from octavo import LLM, SamplingParams
imported = time.perf_counter()
llm = LLM(**json.loads(sys.argv[1]))
loaded = time.perf_counter()
llm.generate([[0]], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0), use_tqdm=False)
done = time.perf_counter()
usage = resource.getrusage(resource.RUSAGE_SELF)
parts = {"import_s": imported - began, "load_s": loaded - imported, "first_token_s": done - loaded}
parts["cpu_s"] = usage.ru_utime + usage.ru_stime
parts["peak_rss_mib"] = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
print(json.dumps(parts))
"""


def _start_once(args: EngineArgs) -> dict[str, float]:
    """Start a process that makes one token; return the figures that it reports, and its seconds seen from outside."""
    began = time.perf_counter()
    child = subprocess.run(
        [*python(), "-c", _CHILD, msgspec.json.encode(_changed(args)).decode()],
        capture_output=True,
        text=True,
        check=False,
    )
    total = time.perf_counter() - began
    if child.returncode != 0:
        failure = child.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
        reason = re.sub(r"^octavo\.errors\.\w+: ", "", failure[0])
        raise EngineDeadError(f"the measured process failed: {reason}")
    parts = msgspec.json.decode(child.stdout.splitlines()[-1], type=dict[str, float])
    return parts | {"process_s": total}


def load(given: Given, *, as_served: bool = False) -> LLM:
    """Return the engine of these arguments, logging quietly. as_served: with the defaults of a server."""
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM

    args = given.arguments(EngineArgs)
    log_quietly(args)
    return LLM.from_engine(LLMEngine.from_args(args)) if as_served else LLM(**vars(args))


def _measure(
    llm: LLM, source: random.Random, options: LoadOptions, num_prompts: int, *, detokenize: bool = False
) -> list[float]:
    """Return the seconds of each repetition, after one that does not count.

    Prompts come from `source`, one for all measurements of a model, so that no prefix is found again.
    """
    params = greedy(options.output_len, detokenize=detokenize)
    vocab_size = llm.config.model.vocab_size

    def once() -> float:
        prompts = [[source.randrange(vocab_size) for _ in range(options.input_len)] for _ in range(num_prompts)]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise ConfigError(f"a request was refused: {output.error.message}")
        return elapsed

    once()
    return [once() for _ in range(options.repetitions)]


def greedy(output_len: int, *, detokenize: bool = False) -> SamplingParams:
    """Return the parameters of requests that all generate so many tokens, the likeliest ones."""
    return SamplingParams(
        max_tokens=output_len, ignore_eos=True, temperature=0, detokenize=detokenize, output_kind=OutputKind.FINAL_ONLY
    )


def _report(name: str, given: Given, workload: dict[str, Any], result: dict[str, Any]) -> None:
    """Report the figures, with the arguments that differ from the defaults."""
    args = given.arguments(EngineArgs)
    report(name, {"model": args.model, "arguments": _changed(args), **workload}, result)


def _changed(args: EngineArgs) -> dict[str, Any]:
    """Return the arguments that differ from the defaults."""
    defaults = EngineArgs()
    return {name: value for name, value in vars(args).items() if value != getattr(defaults, name)}


OTHER = "everything else"
"""The time outside all parts: the loops around them, from the start of one step to the start of the next."""


def medians_us(steps: Sequence[StepTimes], num_seqs: int) -> dict[str, dict[str, float]]:
    """Return microseconds by part, and of the whole `step`: `total`, `kernels`, and `host`, which is the rest.

    Medians over the plain decode steps of `num_seqs` sequences that another step follows at once.
    """
    rows: dict[str, list[PartTime]] = {name: [] for name in [*PARTS, OTHER, "step"]}
    # a step ends where the next one starts; the end of the last one of a run is not known
    for step, following in pairwise(steps):
        if not is_plain_decode(step, num_seqs) or not following.planned:
            continue
        parts = [step.parts.get(name, PartTime()) for name in PARTS]
        whole_ns = following.began_ns - step.began_ns
        kernels_ns = sum(part.kernels_ns for part in parts)
        other = PartTime(whole_ns - sum(part.total_ns for part in parts))
        for name, part in zip(rows, [*parts, other, PartTime(whole_ns, kernels_ns)], strict=True):
            rows[name].append(part)
    assert rows["step"], "no step was a plain decode step"
    return {name: _medians(times) for name, times in rows.items()}


def part_table(medians: dict[str, dict[str, float]]) -> str:
    """Return the result of `medians_us` as a text table."""
    columns = ("total", "kernels", "host")
    lines = [f"  {'µs per step':22}" + "".join(f"{column:>11}" for column in columns)]
    for name, row in medians.items():
        lines.append(f"  {name:22}" + "".join(f"{row[column]:11,.1f}" for column in columns))
    return "\n".join(lines)


def is_plain_decode(step: StepTimes, num_seqs: int) -> bool:
    """Return whether `num_seqs` sequences computed a token each in the step and nothing else happened."""
    if len(step.planned) != 1:
        return False
    (plan,) = step.planned
    return len(plan.rows) == plan.num_tokens == num_seqs and not plan.new_sequences and not plan.finished_ids


def _medians(times: list[PartTime]) -> dict[str, float]:
    return {
        "total": statistics.median(each.total_ns for each in times) / 1e3,
        "kernels": statistics.median(each.kernels_ns for each in times) / 1e3,
        "host": statistics.median(each.total_ns - each.kernels_ns for each in times) / 1e3,
    }
