"""`octavo bench throughput | latency | startup`: what was measured, on what, and one line of JSON.

Prompts are random token ids, and generation goes on after an end-of-sequence token: every run does the same work.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from octavo import __version__
from octavo.cli.options import Given, count, with_options
from octavo.cli.start import log_quietly
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.errors import ConfigError, EngineDeadError
from octavo.platform import Platform

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
    _positive(num_prompts=num_prompts, input_len=input_len, output_len=output_len, repetitions=repetitions)
    llm = _load(given)
    seconds = _measure(llm, repetitions, num_prompts, input_len, output_len)
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
    batch_size: Annotated[int, count("Requests that run together.", "Benchmark")] = 1,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    repetitions: Repetitions = 5,
    given: Given,
) -> int:
    """Seconds that one batch takes from prompt to last token, and per token after the first."""
    _positive(batch_size=batch_size, input_len=input_len, output_len=output_len, repetitions=repetitions)
    llm = _load(given)
    first = statistics.median(_measure(llm, repetitions, batch_size, input_len, 1))
    seconds = _measure(llm, repetitions, batch_size, input_len, output_len)
    whole = statistics.median(seconds)
    per_token = (whole - first) / (output_len - 1) if output_len > 1 else 0.0
    return _report(
        "latency",
        given,
        {"batch_size": batch_size, "input_len": input_len, "output_len": output_len, "repetitions": repetitions},
        {"elapsed_s": whole, "first_token_s": first, "per_token_s": per_token, "all_elapsed_s": seconds},
    )


@with_options(EngineArgs, without=("served_model_name", "disable_log_stats"))
def startup(*, repetitions: Repetitions = 3, given: Given) -> int:
    """Seconds from starting a process to its first token."""
    _positive(repetitions=repetitions)
    args = given.arguments(EngineArgs)
    samples = [_start_once(args) for _ in range(repetitions)]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return _report("startup", given, {"repetitions": repetitions}, medians | {"all": samples})


_CHILD = """
import json, sys, time
began = time.perf_counter()
from octavo import LLM, SamplingParams
llm_class = LLM
imported = time.perf_counter()
llm = LLM(**json.loads(sys.argv[1]))
loaded = time.perf_counter()
llm.generate([[0]], SamplingParams(max_tokens=1, ignore_eos=True, temperature=0), use_tqdm=False)
done = time.perf_counter()
print(json.dumps({"import_s": imported - began, "load_s": loaded - imported, "first_token_s": done - loaded}))
"""


def _start_once(args: EngineArgs) -> dict[str, float]:
    """Start a process that makes one token. The seconds of its parts, and of all of it as seen from outside."""
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


def _load(given: Given) -> LLM:
    from octavo.llm import LLM

    args = given.arguments(EngineArgs)
    log_quietly(args)
    return LLM(**vars(args))


def _measure(llm: LLM, repetitions: int, num_prompts: int, input_len: int, output_len: int) -> list[float]:
    """Seconds of each repetition, after one that does not count. Prompts differ, so that no prefix is found again."""
    params = SamplingParams(
        max_tokens=output_len, ignore_eos=True, temperature=0, detokenize=False, output_kind=OutputKind.FINAL_ONLY
    )
    vocab_size = llm.config.model.vocab_size
    source = random.Random(0)

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
    """What a reader needs to trust the figures, then the figures as one line of JSON."""
    args = given.arguments(EngineArgs)
    platform = Platform.detect()
    changed = {key: value for key, value in vars(args).items() if value != getattr(EngineArgs(), key)}
    commit = _commit()
    print(f"octavo {__version__}{f' at {commit}' if commit else ''}, model {args.model}", file=sys.stderr)
    print(f"{platform.cpu_model}, {platform.cores} cores, {platform.system}", file=sys.stderr)
    for key, value in result.items():
        if isinstance(value, float):
            print(f"  {key:22} {value:,.4g}", file=sys.stderr)
    line = {
        "benchmark": name,
        "model": args.model,
        "version": __version__,
        "commit": commit,
        "cpu": platform.cpu_model,
        "cores": platform.cores,
        "arguments": changed,
        **workload,
        **_rounded(result),
    }
    print(msgspec.json.encode(line).decode())
    return 0


def _rounded(value: Any) -> Any:
    """Six significant digits everywhere: what the clock gives beyond is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _commit() -> str | None:
    """The commit that octavo's source is at, with a plus when files differ from it; None when it is installed."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no") else head


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
