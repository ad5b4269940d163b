"""octavo and other engines on the same workloads, side by side: `python -m benchmarks.peers --model PATH`.

Another engine takes part through a driver, a small Python file (benchmarks/driver.py says what is in it), which runs
in that engine's own virtual environment:

    python -m benchmarks.peers --model PATH --workloads A,B --against "their=.venv/bin/python their_driver.py MODEL"

Every engine has a process of its own. All are loaded first, then they take turns, repetition by repetition, and those
that wait are stopped. Ratios are those of the medians; above 1 octavo is the better one.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import App

import octavo
from benchmarks.engine_process import Answer, EngineProcess, command_with_driver, machine_cpu_s
from benchmarks.table import ratios, table
from benchmarks.workloads import Figures, Workload, figures, named_workloads, summarize
from octavo.cli.help import AlignedHelp
from octavo.cli.main import invoke
from octavo.cli.options import Given, with_options
from octavo.cli.report import report
from octavo.config.args import EngineArgs
from octavo.config.fields import Arguments, arg
from octavo.errors import ConfigError, EngineDeadError

OCTAVO = "octavo"
_DRIVER = Path(__file__).parent / "octavo_driver.py"
_WARM_UP_TOKENS = 4


class PeersOptions(Arguments, heading="Benchmark"):
    """What is compared."""

    workloads: str = arg("A,B,C1,C8,D,E", "Which of A, B, C1, C8, D and E to run.")
    repetitions: int = arg(3, "Times to run each; medians count.", ge=1)
    against: tuple[str, ...] = arg(
        (),
        'Command that runs the driver of another engine, as "NAME=PYTHON DRIVER.py ARGUMENTS"; may be given '
        "several times.",
    )


@with_options(PeersOptions, EngineArgs)
def compare(*, given: Given) -> int:
    """octavo and other engines on the same workloads, in one run in which they take turns."""
    options = given.own(PeersOptions)
    repetitions, against = options.repetitions, options.against
    wanted = named_workloads(options.workloads)
    args = given.arguments(EngineArgs)
    changed = {name: value for name, value in vars(args).items() if value != getattr(EngineArgs(), name)}
    commands = {OCTAVO: octavo_command(changed)}
    for text in against:
        name, words = parse_command(text)
        if name in commands:
            raise ConfigError(f"two engines are called {name}; name them, as in --against 'other=...'")
        commands[name] = command_with_driver(words)
    results = measure(commands, wanted, repetitions)
    print(table(results), file=sys.stderr)
    report(
        "peers",
        {"model": args.model, "arguments": changed, "repetitions": repetitions, "against": list(against)},
        {"engines": results, "ratios": ratios(results)},
    )
    return 0


def octavo_command(keywords: dict[str, Any]) -> list[str]:
    """Runs the driver of the octavo that this is, installed or not, with these keywords of LLM."""
    roots = [str(Path(octavo.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = [sys.executable, str(_DRIVER), msgspec.json.encode(keywords).decode()]
    return ["env", f"PYTHONPATH={os.pathsep.join(roots)}", *command_with_driver(words)]


def parse_command(text: str) -> tuple[str, list[str]]:
    """Name and words of a command. Without a name it is called what its driver is called."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--against {text!r} is not a command: {error}") from error
    name, equals, program = words[0].partition("=") if words else ("", "", "")
    if equals and "/" not in name:
        return name, [program, *words[1:]]
    return next((Path(word).stem for word in words if word.endswith(".py")), text), words


def measure(commands: dict[str, list[str]], workloads: Sequence[Workload], repetitions: int) -> dict[str, Any]:
    """Name of an engine → its start, its memory and its workloads. Raises EngineDeadError."""
    with ExitStack() as stack:
        # an end from outside has to end the engines too: those that wait could not notice by themselves
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-peers-")))
        engines: list[EngineProcess] = []
        results: dict[str, Any] = {}
        for name, words in commands.items():
            print(f"starting {name}", file=sys.stderr)
            engine = stack.enter_context(EngineProcess(name, words, logs / f"{len(engines)}.log"))
            engines.append(engine)
            memory = engine.memory_mb()
            results[name] = {
                "command": shlex.join(words),
                "load_s": engine.load_s,
                "cold_start_s": engine.cold_start_s,
                "first_token_s": engine.first_token_s,
                "rss_after_load_mb": memory["rss"],
                "pss_after_load_mb": memory["pss"],
                "facts": engine.facts,
                "workloads": {},
            }
            engine.pause()
        ours = engines[0].facts
        for workload in (each.fitted(ours["max_model_len"]) for each in workloads):
            found = take_turns(engines, workload, ours["vocab_size"], repetitions)
            for engine in engines:
                results[engine.name]["workloads"][workload.name] = found[engine.name]
                results[engine.name]["peak_rss_mb"] = engine.memory_mb()["peak_rss"]
            print(f"{workload.name} done", file=sys.stderr)
    return results


def take_turns(
    engines: Sequence[EngineProcess], workload: Workload, vocab_size: int, repetitions: int
) -> dict[str, dict[str, Any]]:
    """Name of an engine → its figures for one workload, or what kept it from running it. Raises EngineDeadError."""
    runs: dict[str, list[Figures]] = {engine.name: [] for engine in engines}
    errors: dict[str, str] = {}
    for repetition in range(-1, repetitions):
        # there and back again: a machine that slows down slows down all of them
        for engine in engines if repetition % 2 == 0 else reversed(engines):
            if engine.name in errors:
                continue
            engine.resume()
            try:
                if repetition < 0:
                    warm_up(engine, workload, vocab_size)
                else:
                    runs[engine.name].append(run_once(engine, workload, vocab_size, repetition))
            except (EngineDeadError, ValueError) as error:
                if engine.name == OCTAVO:
                    raise EngineDeadError(f"{OCTAVO}, workload {workload.name}: {error}") from error
                errors[engine.name] = str(error)
            engine.pause()
    shape = [workload.num_requests, workload.prompt_len, workload.output_len, workload.shared_len]
    return {
        name: {"shape": shape, "error": errors[name]}
        if name in errors
        else {"shape": shape, "reps": repetitions, **summarize(each), "runs": each}
        for name, each in runs.items()
    }


def warm_up(engine: EngineProcess, workload: Workload, vocab_size: int) -> None:
    """A quarter of the requests and a few tokens: first uses of a shape cost what later ones do not."""
    prompts = workload.prompts(vocab_size, repetition=-1)[: -(-workload.num_requests // 4)]
    answer = engine.run(prompts, min(_WARM_UP_TOKENS, workload.output_len))
    if answer.error is not None:
        raise EngineDeadError(answer.error)


def run_once(engine: EngineProcess, workload: Workload, vocab_size: int, repetition: int) -> Figures:
    """Figures of one run. other_cpu: how many cores other processes kept busy meanwhile, 0 where it is quiet.

    warm_prefix_wall, warm_prefix_ttft_last: the same once more with the same shared part, where there is one.
    """
    prompts = workload.prompts(vocab_size, repetition)
    machine_s, engine_s = machine_cpu_s(), engine.cpu_s()
    answer = engine.run(prompts, workload.output_len)
    machine_s, engine_s = machine_cpu_s() - machine_s, engine.cpu_s() - engine_s
    found = _figures(workload, answer)
    found["other_cpu"] = max(0.0, machine_s - engine_s) / found["wall"]
    if workload.shared_len:
        again = _figures(workload, engine.run(workload.prompts(vocab_size, repetition, variant=1), workload.output_len))
        found["warm_prefix_wall"], found["warm_prefix_ttft_last"] = again["wall"], again["ttft_last"]
    return found


def _figures(workload: Workload, answer: Answer) -> Figures:
    if answer.error is not None:
        raise EngineDeadError(answer.error)
    return figures(workload, answer.began, answer.events, answer.ended)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    app = App(name="python -m benchmarks.peers", help_format="plaintext", help_formatter=AlignedHelp())
    app.default(compare)
    return invoke(app, tokens)


if __name__ == "__main__":
    sys.exit(main())
