"""Runs an engine's driver in a process of its own and has it do the work that comes in, a line of JSON each.

`PYTHON benchmarks/driver.py DRIVER.py ARGUMENTS...`: DRIVER.py defines a class `Engine` without parameters that loads
the model (it finds ARGUMENTS in `sys.argv`), with a method

    run(prompts: list[list[int]], max_tokens: int) -> (began, [(seconds, request, new tokens), ...], ended)

which continues all prompts at once, greedily and past any end-of-sequence token, and notes when each token could be
seen. An attribute `facts`, a dict, is passed on when there is one. Standard library only: this runs in the virtual
environment of any engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """The driver as a module. It is the program that runs: it sees its own name and its own arguments."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def answer(engine: Any, work: dict[str, Any]) -> dict[str, Any]:
    try:
        began, events, ended = engine.run(work["prompts"], work["max_tokens"])
    except Exception as error:
        # one workload may be too much for an engine; whoever asked decides what that means
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"began": began, "events": events, "ended": ended}


def main() -> None:
    # engines print what they like: standard output becomes standard error, the answers have a channel of their own
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    path = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(path.parent)
    began = time.perf_counter()
    engine = load(path).Engine()
    send({"load_s": time.perf_counter() - began, "facts": getattr(engine, "facts", {})})
    for line in requests:
        send(answer(engine, json.loads(line)))


if __name__ == "__main__":
    main()
