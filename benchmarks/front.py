"""What the front costs (HTTP, text, tokens): `python -m benchmarks.front`.

    python -m benchmarks.front --streams 1000 --tokens 32 --requests 100000

A server with a small model answers many streams at once. Its front process is the one that is weighed, by processor
seconds of the system (user and system): µs for each streamed token, µs for each short request that is not streamed,
processor share at rest, and how its resident memory grows over `--requests` requests. The engine's own process and this
one, which reads the streams, do not count; `--instant` takes an engine that answers at once (`benchmarks.instant_core`)
whose memory traffic does not count either. The time of a streamed token is that of whole streams less that of as many
with one token, so that what a request itself costs is not in it. Fronts can be compared: `--serve ARGUMENTS` may be
given several times, and the servers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.gaps import served
from octavo.cli.report import report
from octavo.errors import EngineDeadError

_REST_S = 5.0
_CONNECTIONS = 64
"""Of short requests at once."""


class Front(NamedTuple):
    """A server's address, and the process that listens there."""

    host: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Return the seconds for which threads of the process, which are there still, have run."""
        run_ns = (int(each.read_text().split()[0]) for each in Path(f"/proc/{self.pid}/task").glob("*/schedstat"))
        return sum(run_ns) / 1e9

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _request(front: Front, **fields: Any) -> bytes:
    body = json.dumps({"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {front.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _stream(front: Front, num_tokens: int) -> int:
    """Read one stream to its end; return its number of events. Raises EngineDeadError."""
    reader, writer = await asyncio.open_connection(front.host, front.port, limit=1 << 20)
    writer.write(_request(front, max_tokens=num_tokens, stream=True, return_token_ids=True))
    num_events, tail = 0, b""
    while b"data: [DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise EngineDeadError(f"the stream ended early: {tail[-300:]!r}")
        num_events += data.count(b"data: {")
        tail = tail[-16:] + data
    writer.close()
    return num_events


async def _short_requests(front: Front, count: int) -> None:
    """Send requests for one token over connections that stay. Raises EngineDeadError."""
    numbers = iter(range(count))
    request = _request(front, max_tokens=1)

    async def work() -> None:
        reader, writer = await asyncio.open_connection(front.host, front.port)
        for _ in numbers:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise EngineDeadError(f"the server responded with {head[:200]!r}")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        writer.close()

    await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))


async def streamed(front: Front, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Return what many streams at once cost the front."""
    cpu = front.cpu_s()
    num_begun = sum(await asyncio.gather(*(_stream(front, 1) for _ in range(num_streams))))
    cpu, beginning_s, began = front.cpu_s(), front.cpu_s() - cpu, time.perf_counter()
    events = await asyncio.gather(*(_stream(front, num_tokens) for _ in range(num_streams)))
    seconds, cpu = time.perf_counter() - began, front.cpu_s() - cpu
    total = num_streams * num_tokens
    return {
        "us_per_streamed_token": 1e6 * (cpu - beginning_s) / (total - num_streams),
        "us_per_event": 1e6 * (cpu - beginning_s) / (sum(events) - num_begun),
        "us_with_requests": 1e6 * cpu / total,
        "tokens_per_event": total / sum(events),
        "streamed_tokens_per_s": total / seconds,
        "front_share_of_a_core": cpu / seconds,
    }


async def answered(front: Front, count: int) -> dict[str, float]:
    """Return what short requests cost the front, and its growth over them. The first tenth does not count."""
    await _short_requests(front, count // 10)
    resident, cpu, began = front.resident_mib(), front.cpu_s(), time.perf_counter()
    await _short_requests(front, count)
    seconds, cpu = time.perf_counter() - began, front.cpu_s() - cpu
    return {
        "us_per_request": 1e6 * cpu / count,
        "requests_per_s": count / seconds,
        "requests_per_s_of_a_core": count / cpu,
        "growth_mib": front.resident_mib() - resident,
    }


def rest(front: Front) -> dict[str, float]:
    """Return the share of a core that the front uses without requests."""
    time.sleep(1.0)
    cpu = front.cpu_s()
    time.sleep(_REST_S)
    return {"idle_share_of_a_core": (front.cpu_s() - cpu) / _REST_S}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="append", default=[], help="arguments of octavo serve")
    parser.add_argument("--instant", action="store_true", help="engines that answer at once")
    parser.add_argument("--streams", type=int, default=256, help="streams at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each stream")
    parser.add_argument("--requests", type=int, default=2000, help="short requests, over which memory may grow")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    module = "benchmarks.instant_core" if args.instant else "octavo"
    servers = args.serve or [f"octavo-tiny --max-num-seqs {args.streams}"]
    runs: dict[str, list[dict[str, float]]] = {words: [] for words in servers}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-front-")))
        fronts = {}
        for place, words in enumerate(servers):
            server = stack.enter_context(served(words, folder / f"{place}.log", module))
            address = urlsplit(server.url)
            fronts[words] = Front(str(address.hostname), address.port or 80, server.pid)
        for _ in range(args.repetitions):
            for words, front in fronts.items():
                found = asyncio.run(streamed(front, args.streams, args.tokens))
                found |= asyncio.run(answered(front, args.requests)) | rest(front)
                runs[words].append(found)
                print(f"{words}: " + ", ".join(f"{key} {value:,.4g}" for key, value in found.items()), file=sys.stderr)
    medians = {
        words: {key: statistics.median(each[key] for each in found) for key in found[0]}
        for words, found in runs.items()
    }
    report("front", {"arguments": vars(args)}, {"servers": medians, "runs": runs})


if __name__ == "__main__":
    main()
