"""The most memory that a piece of code holds at one time: what torch allocates, and what numpy and Python do."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Peak over what was allocated before; what lies inside operators counts too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        pass  # the first profile of a process imports much
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        _, python_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    live: dict[int, int] = {}
    held = peak = 0
    for event in sorted((each for each in events if each["name"] == "[memory]"), key=lambda each: float(each["ts"])):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        # what is freed counts only where it was allocated in here
        held += size - live.get(address, 0) if size > 0 else -live.get(address, 0)
        live[address] = max(size, 0)
        peak = max(peak, held)
    assert peak > 0, "the profiler saw no allocation"
    return peak + python_peak
