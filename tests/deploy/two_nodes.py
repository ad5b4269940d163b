"""A program that runs octavo on a Ray cluster of two nodes of this machine, kills a replica, and prints the results.

It is a program of its own, because Ray keeps threads and processes of whoever connects to it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from ray.cluster_utils import Cluster

from octavo.deploy.ray_serve import build_app

PORT = 18_200
REPLICA = "ray::ServeReplica:default:octavo"
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
ARGUMENTS = {"model": "octavo-tiny", "threads": 1, "kv_cache_memory": "32MiB", "swap_space": "0"}
SCALING = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5}
NUM_STREAMS = 8


def stream(seed: int, on_text: Callable[[], None] = lambda: None) -> str | None:
    """Return the text of a stream; None for one that broke off, which has no end."""
    body = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "seed": seed, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response, text = connection.getresponse(), ""
    try:
        while line := response.readline():
            if line.startswith(b"data: [DONE]"):
                return text
            if line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                on_text()
    except (http.client.IncompleteRead, ConnectionError):
        return None
    return None


def streams(on_text: Callable[[], None] = lambda: None) -> list[str | None]:
    found: list[str | None] = [None] * NUM_STREAMS

    def run(seed: int) -> None:
        found[seed] = stream(seed, on_text)

    threads = [threading.Thread(target=run, args=[seed]) for seed in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def replicas() -> set[int]:
    """Return the processes of replicas."""
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if REPLICA in read(path)}


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return ""


def parent(pid: int) -> int:
    return int(read(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()[1])


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in read(task).split()]


def wait(until: Callable[[], bool], seconds: float = 60) -> float:
    began = time.monotonic()
    while not until():
        assert time.monotonic() < began + seconds, "it did not happen"
        time.sleep(0.1)
    return time.monotonic() - began


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
    try:
        # a proxy prefers the replica of its node until that has its most requests
        limits = {"max_replicas_per_node": 1, "max_ongoing_requests": NUM_STREAMS // 2}
        serve.run(build_app({**ARGUMENTS, "deployment": {"autoscaling_config": SCALING, **limits}}))
        report: dict[str, Any] = {"replicas_before_load": len(replicas())}
        report["undisturbed"] = streams()
        while len(replicas()) < 2:
            streams()
        report["num_nodes"] = len({parent(pid) for pid in replicas()})
        report["on_two_replicas"] = streams()
        victim = max(replicas())
        cores, began = children(victim), threading.Semaphore(0)
        killer = threading.Thread(
            target=lambda: [began.acquire() for _ in range(10 * NUM_STREAMS)] and os.kill(victim, signal.SIGKILL)
        )
        killer.start()
        report["with_a_death"] = streams(began.release)
        report["after"] = streams()
        report["core_gone_s"] = wait(lambda: not any(os.path.exists(f"/proc/{core}") for core in cores))
        report["num_cores"] = len(cores)
        report["replaced_s"] = wait(lambda: len(replicas() - {victim}) == 2)
        print(json.dumps(report))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
