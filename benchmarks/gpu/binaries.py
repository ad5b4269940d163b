"""Engines whose kernels are launched from binaries, beside those whose kernels Triton compiles and launches here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

from benchmarks.gpu.exactness import BASE, answers, asked
from octavo import LLM
from octavo.devices.cuda import device
from octavo.devices.cuda.cubins import CubinLauncher
from octavo.devices.cuda.runtime import Launcher, launch_by_triton

WAYS: Final = ("binaries", "Triton")


def binaries() -> Iterator[dict[str, Any]]:
    """Yield for both ways, each with graphs and without, the time of a start, which kernels had no binary, and whether
    all answers are those of the first.

    The bits are the same where the archive was made by the Triton that is installed; no answers where there is none.
    """
    prompts, params = asked()
    expected: list[Any] | None = None
    opened = device.open_launcher
    for way in WAYS:
        for enforce_eager in (False, True):
            made: list[Launcher] = []

            def open_noted(*given: Any, way: str = way, made: list[Launcher] = made, **named: Any) -> Launcher:
                made.append(opened(*given, **named) if way == WAYS[0] else launch_by_triton)
                return made[-1]

            args = BASE | {"batch_invariant": False, "enforce_eager": enforce_eager}
            begun = time.perf_counter()
            with patch.object(device, "open_launcher", open_noted), LLM("octavo-tiny", **args) as llm:
                started = time.perf_counter() - begun
                if way == WAYS[0] and not isinstance(made[0], CubinLauncher):
                    yield {"launched by": way, "not run": "no archive fits: python -m tools.cubins makes one"}
                    break
                found = answers(llm, prompts, params)
            expected = expected or found
            missing = sorted({call.kernel for call in getattr(made[0], "missing", ())})
            about = {"launched by": way, "enforce_eager": enforce_eager, "start_s": round(started, 2)}
            yield {**about, "without a binary": missing, "as_the_first": found == expected}
