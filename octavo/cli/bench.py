"""`octavo bench throughput | latency | startup`: what was measured, on what, and one line of JSON.

Prompts are random token ids, and generation goes on after an end-of-sequence token: every run does the same work.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from octavo.cli.options import Given, count, counts, switch, with_options
from octavo.cli.report import report
from octavo.cli.start import log_quietly
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from octavo.llm import LLM

Repetitions = Annotated[int, count("Times to measure; the median counts.", "Benchmark")]
InputLen = Annotated[int, count("Tokens of each prompt.", "Benchmark")]
OutputLen = Annotated[int, count("Tokens to generate for each prompt.", "Benchmark")]


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def throughput(
    *,
    num_prompts: Annotated[int, count("Requests that are handed in at once.", "Benchmark")] = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    repetitions: Repetitions = 3,
    given: Given,
) -> int:
    """Tokens per second of many requests that are there at once."""
    positive(num_prompts=num_prompts, input_len=input_len, output_len=output_len, repetitions=repetitions)
    llm = load(given)
    seconds = _measure(llm, random.Random(0), repetitions, num_prompts, input_len, output_len)
    median = statistics.median(seconds)
    return _report(
        "throughput",
        given,
        {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len, "repetitions": repetitions},
        {
            "elapsed_s": median,
            "requests_per_s": num_prompts / median,
            "output_tokens_per_s": num_prompts * output_len / median,
            "total_tokens_per_s": num_prompts * (input_len + output_len) / median,
            "all_elapsed_s": seconds,
        },
    )


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def latency(
    *,
    batch_size: Annotated[
        tuple[int, ...],
        counts("Requests that run together; several numbers, as in 1,64, are several runs.", "Benchmark"),
    ] = (1,),
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    repetitions: Repetitions = 5,
    breakdown: Annotated[
        bool, switch("Also tell where the time of a decode step goes, and how much of it is not kernels.", "Benchmark")
    ] = False,
    given: Given,
) -> int:
    """Seconds that one batch takes from prompt to last token, and per token after the first."""
    positive(batch_size=min(batch_size), input_len=input_len, output_len=output_len, repetitions=repetitions)
    if breakdown and output_len < 8:
        raise ConfigError(f"output_len is {output_len}, must be at least 8 with breakdown: medians need some steps")
    llm = load(given)
    source = random.Random(0)
    for size in batch_size:
        _latency(llm, source, given, size, input_len, output_len, repetitions, breakdown)
    return 0


def _latency(
    llm: LLM,
    source: random.Random,
    given: Given,
    batch_size: int,
    input_len: int,
    output_len: int,
    repetitions: int,
    breakdown: bool,
) -> None:
    first = statistics.median(_measure(llm, source, repetitions, batch_size, input_len, 1))
    seconds = _measure(llm, source, repetitions, batch_size, input_len, output_len)
    whole = statistics.median(seconds)
    per_token = (whole - first) / (output_len - 1) if output_len > 1 else 0.0
    result = {"elapsed_s": whole, "first_token_s": first, "per_token_s": per_token, "all_elapsed_s": seconds}
    if breakdown:
        from octavo.cli.breakdown import decode_steps, medians_us, table

        with llm.engine.timed_steps() as steps:
            _measure(llm, source, repetitions, batch_size, input_len, output_len, detokenize=True)
        medians = medians_us(steps, batch_size)
        result |= {"breakdown_steps": len(decode_steps(steps, batch_size)), "breakdown_us": medians}
        print(table(medians), file=sys.stderr)
    _report(
        "latency",
        given,
        {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "repetitions": repetitions},
        result,
    )


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def startup(*, repetitions: Repetitions = 3, given: Given) -> int:
    """Seconds from starting a process to its first token, what they cost the processors, and the memory at the peak."""
    positive(repetitions=repetitions)
    args = given.arguments(EngineArgs)
    samples = [_start_once(args) for _ in range(repetitions)]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return _report("startup", given, {"repetitions": repetitions}, medians | {"all": samples})


_CHILD = """
import json, resource, sys, time
began = time.perf_counter()
from octavo import LLM, SamplingParams
llm_class = LLM
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
    """Start a process that makes one token: its parts, what it says of itself, and its seconds as seen from outside."""
    defaults = EngineArgs()
    keywords = {name: value for name, value in vars(args).items() if value != getattr(defaults, name)}
    began = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, msgspec.json.encode(keywords).decode()],
        capture_output=True,
        text=True,
        check=False,
    )
    total = time.perf_counter() - began
    if child.returncode != 0:
        last_words = child.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise EngineDeadError(f"the measured process failed: {last_words[0]}")
    parts = msgspec.json.decode(child.stdout.splitlines()[-1], type=dict[str, float])
    return parts | {"process_s": total}


def load(given: Given) -> LLM:
    """The engine of these arguments, logging quietly."""
    from octavo.llm import LLM

    args = given.arguments(EngineArgs)
    log_quietly(args)
    return LLM(**vars(args))


def load_as_served(given: Given) -> LLM:
    """Return the engine of these arguments with the defaults of a server, logging quietly."""
    from octavo.engine.llm_engine import LLMEngine
    from octavo.llm import LLM

    args = given.arguments(EngineArgs)
    log_quietly(args)
    return LLM.from_engine(LLMEngine.from_args(args))


def _measure(
    llm: LLM,
    source: random.Random,
    repetitions: int,
    num_prompts: int,
    input_len: int,
    output_len: int,
    *,
    detokenize: bool = False,
) -> list[float]:
    """Seconds of each repetition, after one that does not count.

    Prompts come from `source`, one for all measurements of a model, so that no prefix is found again.
    """
    params = SamplingParams(
        max_tokens=output_len, ignore_eos=True, temperature=0, detokenize=detokenize, output_kind=OutputKind.FINAL_ONLY
    )
    vocab_size = llm.config.model.vocab_size

    def once() -> float:
        prompts = [[source.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise ConfigError(f"a request was refused: {output.error.message}")
        return elapsed

    once()
    return [once() for _ in range(repetitions)]


def _report(name: str, given: Given, workload: dict[str, Any], result: dict[str, Any]) -> int:
    """The figures, with the arguments that differ from the defaults."""
    args = given.arguments(EngineArgs)
    changed = {key: value for key, value in vars(args).items() if value != getattr(EngineArgs(), key)}
    report(name, {"model": args.model, "arguments": changed, **workload}, result)
    return 0


def positive(**values: int) -> None:
    """Refuse values below 1."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
