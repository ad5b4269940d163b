"""Gaps between tokens under load, of octavo and of any other OpenAI-compatible server: `python -m benchmarks.gaps`.

    python -m benchmarks.gaps --serve "--model PATH" --load streams
    python -m benchmarks.gaps --serve "--model PATH" --url vllm=http://127.0.0.1:8001 --load poisson --rate 0.5

`--serve ARGUMENTS` starts `octavo serve` with them, `--url NAME=URL` takes a server that runs; each may be given
several times (`--serve NAME="..."` names it), for settings or engines side by side. Servers take turns, repetition by
repetition. Loads, of random tokens, the same for every server:

    streams  six requests (64 → 400 tokens) decode, and while they do four prompts of 1,500 tokens arrive (→ 32)
    poisson  requests of log-normal lengths (--input-len, --output-len) arrive at --rate a second

A gap is the time between two events of one stream. Ratios are those of the medians to the first server's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

from octavo.cli.report import report
from octavo.errors import ConfigError, EngineDeadError
from octavo.simulate.report import Spread
from octavo.simulate.traces import Workload, generate

_FIRST_TOKEN, _LAST_TOKEN = 10, 3_000
_START_S = 600.0


class Asked(NamedTuple):
    """A request: when it is sent, in seconds since the begin, and its lengths in tokens."""

    at_s: float
    input_len: int
    output_len: int


class Streamed(NamedTuple):
    """When a request was sent and when its events came, in seconds of one clock."""

    sent_s: float
    events_s: list[float]


def streams(scale: float) -> list[Asked]:
    """Six that decode, and four long prompts that come `4 * scale` seconds later."""
    return [Asked(0.0, 64, 400)] * 6 + [Asked(4 * scale, 1500, 32)] * 4


def poisson(rate: float, count: int, input_len: int, output_len: int, seed: int) -> list[Asked]:
    """Requests that come independently of each other, with log-normal lengths."""
    workload = Workload(
        request_rate=rate, num_requests=count, input_len=input_len, output_len=output_len, length_spread=0.6
    )
    return [Asked(each.arrival_s, each.prompt_len, each.output_len) for each in generate(workload, seed)]


class Server:
    """An OpenAI-compatible server. `api_key` is sent when there is one."""

    def __init__(self, name: str, url: str, api_key: str | None = None) -> None:
        self.name = name
        parts = urlsplit(url if "://" in url else f"http://{url}")
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model: str = json.loads(self._get("/v1/models"))["data"][0]["id"]

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=60)
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            raise EngineDeadError(f"{self.name} answered {answer.status} to {path}: {body[:200]!r}")
        return body

    def stream(self, prompt: Sequence[int], output_len: int) -> Streamed:
        """Continue a prompt greedily, past any end token. Raises EngineDeadError."""
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": output_len, "temperature": 0, "stream": True,
            "ignore_eos": True, "logprobs": 0,  # with them a token without text is an event too
        }  # fmt: skip
        connection = http.client.HTTPConnection(self._host, self._port, timeout=3600)
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise EngineDeadError(f"{self.name} answered {answer.status}: {answer.read()[:200]!r}")
        events = []
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                choices = json.loads(line[6:]).get("choices")
                if choices and choices[0].get("logprobs"):
                    events.append(now)
        connection.close()
        return Streamed(sent, events)


def run(server: Server, load: Sequence[Asked], seed: int) -> list[Streamed]:
    """Send every request at its time, each from a thread of its own. Raises EngineDeadError for one that fails."""
    source = random.Random(seed)
    prompts = [[source.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(each.input_len)] for each in load]
    found: list[Streamed | Exception | None] = [None] * len(load)
    began = time.perf_counter()

    def send(place: int) -> None:
        asked = load[place]
        time.sleep(max(0.0, began + asked.at_s - time.perf_counter()))
        try:
            found[place] = server.stream(prompts[place], asked.output_len)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=send, args=(place,), daemon=True) for place in range(len(load))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise EngineDeadError(f"{server.name}: {errors[0]}")
    return [each for each in found if isinstance(each, Streamed)]


def figures(load: Sequence[Asked], found: Sequence[Streamed]) -> dict[str, float]:
    """Milliseconds between events and to the first one, and what was served in which time."""
    gaps = [b - a for each in found for a, b in zip(each.events_s, each.events_s[1:], strict=False)]
    gap = Spread.of(gaps)
    first = Spread.of(each.events_s[0] - each.sent_s for each in found)
    ended = max(each.events_s[-1] for each in found)
    total_s = ended - min(each.sent_s for each in found)
    num_tokens = sum(each.output_len for each in load)
    return {
        "gap_median_ms": 1e3 * gap.p50,
        "gap_p99_ms": 1e3 * gap.p99,
        "gap_worst_ms": 1e3 * max(gaps),
        "gap_p99_over_median": gap.p99 / gap.p50,
        "first_token_mean_ms": 1e3 * first.mean,
        "first_token_p99_ms": 1e3 * first.p99,
        "output_tokens_per_s": num_tokens / total_s,
        "total_s": total_s,
    }


class Served(NamedTuple):
    """A server that was started: its URL, and its front's process."""

    url: str
    pid: int


@contextmanager
def served(arguments: str, log: Path, module: str = "octavo") -> Iterator[Served]:
    """`octavo serve` with these arguments, which ends with the block. module: another that serves. Raises
    EngineDeadError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", module, "serve", "--port", str(port), *shlex.split(arguments)]
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineDeadError(f"octavo serve did not start: {log.read_text()[-500:]}")
            time.sleep(0.2)
        yield Served(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait()


def _named(text: str, default: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    return (name, rest) if equals and name.isidentifier() else (default, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="append", default=[], help="arguments of octavo serve, or NAME=ARGUMENTS")
    parser.add_argument("--url", action="append", default=[], help="URL of a server that runs, or NAME=URL")
    parser.add_argument("--api-key")
    parser.add_argument("--load", choices=["streams", "poisson"], default="streams")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time until the long prompts come")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--input-len", type=int, default=256, help="mean tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    if not args.serve and not args.url:
        raise ConfigError("there is no server; give --serve ARGUMENTS or --url URL")
    runs: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-gaps-")))
        servers = []
        for place, text in enumerate(args.serve):
            name, words = _named(text, f"octavo{place or ''}")
            url = stack.enter_context(served(words, folder / f"{place}.log")).url
            servers.append(Server(name, url, args.api_key))
        for place, text in enumerate(args.url):
            name, url = _named(text, f"server{place or ''}")
            servers.append(Server(name, url, args.api_key))
        for server in servers:
            run(server, [Asked(0.0, 64, 16)] * 2, seed=-1)  # what is used for the first time takes longer
        for repetition in range(args.repetitions):
            load = (
                streams(args.scale)
                if args.load == "streams"
                else poisson(args.rate, args.num_requests, args.input_len, args.output_len, seed=repetition)
            )
            # there and back again: a machine that slows down slows down all of them
            for server in servers if repetition % 2 == 0 else reversed(servers):
                found = figures(load, run(server, load, seed=repetition))
                runs.setdefault(server.name, []).append(found)
                shown = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
                print(f"{server.name}: {shown}", file=sys.stderr)
    medians = {
        name: {key: statistics.median(each[key] for each in found) for key in found[0]} for name, found in runs.items()
    }
    ours = next(iter(medians.values()))
    ratios = {
        name: {key: value / ours[key] for key, value in found.items()} for name, found in list(medians.items())[1:]
    }
    arguments: dict[str, Any] = {key: value for key, value in vars(args).items() if key != "api_key"}
    report("gaps", {"arguments": arguments}, {"servers": medians, "ratios": ratios, "runs": runs})


if __name__ == "__main__":
    main()
