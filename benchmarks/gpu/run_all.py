"""Check and time everything of the device cuda on a GPU: `python -m benchmarks.gpu.run_all [--parts start overlap]`.

The parts (`python -m benchmarks.gpu.parts --help` lists them) print a JSON line for each result, and run in one
process. When a part fails, ends the process or takes longer than it may, the others run in a new process. After
`--seconds` the run is stopped, and the last line names the parts that have not run. With it, a part may take an equal
share of the time that is left, so that one that hangs leaves time to the others. Parts that measure no time may run at
the same time, in calls of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from typing import Any, Final

COMMAND: Final = (sys.executable, "-m", "benchmarks.gpu.parts")
"""Takes `--parts`, prints a line with their names as `parts`, and after the lines of each one with its name as `part`,
which says `failed` where it has."""


def run_all(parts: Sequence[str], seconds: float, part_seconds: float, command: Sequence[str]) -> dict[str, str]:
    """Run parts, or all of them where none is given, and print their lines. Return why some have failed, by names.

    A part may take `part_seconds`, and no more than its share of what is left of `seconds`.
    """
    end, failed = time.monotonic() + seconds, dict[str, str]()
    left = [*parts]
    while True:
        known, ended, why = _run([*command, *(["--parts", *left] if left else [])], end, part_seconds)
        if not known:
            return failed | dict.fromkeys(left or ["all"], f"not begun: {why}")
        left, failures = known[len(ended) :], {name: each for name, each in ended.items() if each}
        if left and not failures:
            failures = {left[0]: why}
            print(json.dumps({"part": left.pop(0), "failed": why}), flush=True)
        failed |= failures
        if left and time.monotonic() >= end:
            return failed | dict.fromkeys(left, "not run: the time of the run was over")
        if not left:
            return failed


def _run(command: Sequence[str], end: float, part_seconds: float) -> tuple[list[str], dict[str, str], str]:
    """Run a process, no longer than until `end`, and each of its parts for `part_seconds` or its share of the time.
    Return the names that it prints, for each part that has ended why it failed ("" where it has not), and how the
    process ended."""
    known, ended, stopped = list[str](), dict[str, str](), list[str]()

    def stop(process: subprocess.Popen[str], after: float) -> None:
        stopped.append(f"stopped after {after:.0f} s")
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)

    def watch(process: subprocess.Popen[str]) -> Timer:
        share = (end - time.monotonic()) / max(1, len(known) - len(ended))
        allowed = max(0.0, min(part_seconds, share))
        timer = Timer(allowed, stop, [process, allowed])
        timer.start()
        return timer

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        timer = watch(process)
        try:
            assert process.stdout is not None
            for text in process.stdout:
                print(text, end="", flush=True)
                line = _line(text)
                known = line.get("parts", known)
                if "part" in line:
                    ended[line["part"]] = line.get("failed", "")
                if "part" in line or "parts" in line:
                    timer.cancel()
                    timer = watch(process)
            code = process.wait()
        except BaseException:
            stop(process, 0.0)
            raise
        finally:
            timer.cancel()
    return known, ended, stopped[0] if stopped else f"its process ended with status {code}"


def _line(text: str) -> dict[str, Any]:
    """Return the JSON object of a line; an empty one where it is something else, such as a library's message."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def main() -> int:
    """Run the parts and print why some have failed; return 1 where one has."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run_all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", default=[], help="run these parts only (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop the run after so many seconds (default: no limit)"
    )
    parser.add_argument(
        "--part-seconds", type=float, default=900.0, help="stop a part after so many seconds (default: %(default)g)"
    )
    arguments = parser.parse_args()
    failed = run_all(arguments.parts, arguments.seconds, arguments.part_seconds, COMMAND)
    print(json.dumps({"failed": failed}), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
