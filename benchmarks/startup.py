"""Cold starts of `octavo serve`: seconds from the start of the process until it answers, first and later ones.

`python -m benchmarks.startup MODEL` alternates starts without packed weights and starts with them, in a cache folder of
its own that is removed afterwards. Seconds are those until `/ready` responds with 200; processor seconds are those of
the server with its engine from start to end. Files are in the page cache after the first pair, which does not count.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_DEADLINE_S = 300.0


def start(model: str, environ: dict[str, str], arguments: list[str], *, until_kept: Path | None) -> dict[str, float]:
    """Start a server, wait for its health, and end it. With `until_kept` it ends once that folder keeps its weights."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "octavo", "serve", model, "--port", "0", *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if "http://" not in line:
            raise SystemExit(f"the server did not start: {line!r}")
        address = line.rsplit("http://", 1)[1].split("/")[0]
        while True:  # it responds while the model loads
            connection = http.client.HTTPConnection(address)
            connection.request("GET", "/ready")
            if connection.getresponse().status == http.client.OK:
                break
            time.sleep(0.02)
        ready = time.perf_counter() - began
        deadline = time.monotonic() + _DEADLINE_S
        while until_kept is not None and not any(until_kept.glob("*.files.json")):
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing is kept in {until_kept}")
            time.sleep(0.05)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"ready_s": ready, "cpu_s": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or name, from 128 MiB on")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="for octavo serve, after --")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {"first": [], "later": []}
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {"XDG_CACHE_HOME": folder}
        packed = Path(folder) / "octavo" / "packed"
        for _ in range(options.repetitions + 1):
            shutil.rmtree(packed, ignore_errors=True)
            figures["first"].append(start(options.model, environ, options.arguments, until_kept=packed))
            figures["later"].append(start(options.model, environ, options.arguments, until_kept=None))
    summary = {
        name: {
            key: {"median": statistics.median(values), "least": min(values), "all": values}
            for key in ("ready_s", "cpu_s")
            for values in [[round(run[key], 3) for run in runs[1:]]]
        }
        for name, runs in figures.items()
    }
    for name, values in summary.items():
        ready, cpu = values["ready_s"], values["cpu_s"]
        seconds = f"{ready['median']:.2f} s (least {ready['least']:.2f})"
        print(f"{name:6s} start: ready after {seconds}, {cpu['median']:.2f} CPU s")
    print(json.dumps({"benchmark": "startup_serve", "model": options.model, **summary}))


if __name__ == "__main__":
    main()
