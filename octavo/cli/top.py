"""`octavo top`: shows the load of a server, from its metrics and the scheduler's endpoints."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import msgspec

from octavo.cli.openai_client import OpenAIClient, read_api_key
from octavo.cli.options import Given, with_options
from octavo.cli.report import rounded
from octavo.cli.terminal import columns, printable, sparkline
from octavo.config.explain import render_bar, render_table
from octavo.config.fields import Arguments, arg
from octavo.errors import InvalidRequest, RequestFailed, ServerUnreachable
from octavo.server.schema.scheduler import Timeline, TimelineList

_NUM_RECENT: Final = 6


class TopOptions(Arguments, heading="Server"):
    """Options of `octavo top`: the server, and how it is watched."""

    url: str = arg("http://127.0.0.1:8000", "Address of the server.")
    api_key_file: str | None = arg(None, "File whose first line is the API key; it needs the right observe.")
    interval: float = arg(1.0, "Seconds between two readings.", ge=0.1, le=3600)
    once: bool = arg(False, "Write the figures of one interval as a line of JSON, and end.")


class Load(msgspec.Struct, kw_only=True):
    """The load of one replica, or of all of them. Rates and the hit rate are of the last interval (None: no lookups).

    num_paused, num_sleeping: replicas that are paused, or asleep.
    """

    replica: str
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    prefix_hit_rate: float | None = None
    preemptions: int = 0
    num_paused: int = 0
    num_sleeping: int = 0

    @property
    def held(self) -> str:
        """Return the reason why all requests wait (pause or sleep), in words; "" if they run."""
        if self.num_sleeping:
            return "sleeping: requests wait until POST /wake_up"
        return "paused: requests wait until POST /resume" if self.num_paused else ""


@with_options(TopOptions)
def top(*, given: Given) -> None:
    """Watch a server: requests, tokens per second, queues, KV cache, prefix hits and preemptions of each replica."""
    options = given.own(TopOptions)
    server = OpenAIClient(options.url, read_api_key(options.api_key_file))
    with asyncio.Runner() as runner:
        if options.once:
            found = msgspec.to_builtins(runner.run(_once(server, options.interval)))
            print(msgspec.json.encode(rounded(found)).decode())
            return
        with suppress(KeyboardInterrupt):
            runner.run(_watch(server, options.interval))


async def _once(server: OpenAIClient, interval_s: float) -> dict[str, Any]:
    before = await Counters.read(server)
    await asyncio.sleep(interval_s)
    after = await Counters.read(server)
    return {"url": server.address, "model": after.model, "replicas": loads(before, after)}


async def _watch(server: OpenAIClient, interval_s: float) -> None:
    """Show the load until it is interrupted; a server that cannot be reached is tried again."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    is_screen = console.is_terminal and not console.is_dumb_terminal
    before = await Counters.read(server)
    history: deque[float] = deque(maxlen=60)
    screen: AbstractContextManager[Any] = nullcontext()
    if is_screen:
        screen = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False)
    with screen as live:
        while True:
            await asyncio.sleep(interval_s)
            try:
                after = await Counters.read(server)
                found = loads(before, after)
                before = after
                history.append(found[-1].generated_tokens_per_s)
                recent = await _recent(server) if is_screen else []
                text = frame(server.address, after.model, found, history, recent) if is_screen else line(found[-1])
            except (ServerUnreachable, RequestFailed) as error:
                text = f"{error}; trying again"
            if is_screen:
                rows = printable(text).split("\n")[: console.height]
                live.update(Text("\n".join(rows), no_wrap=True, overflow="ellipsis"), refresh=True)
            else:
                print(printable(text), flush=True)


class Counters(msgspec.Struct, frozen=True):
    """The samples of /metrics by replica and by name without prefix. read_s: seconds of a monotonic clock when they
    were read."""

    model: str
    replicas: dict[str, dict[str, float]]
    read_s: float

    @classmethod
    async def read(cls, server: OpenAIClient) -> Counters:
        """Read the samples. Raises ServerUnreachable, and InvalidRequest if the server has no metrics or the key no
        right to them."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await server.get("/metrics")).decode(errors="replace")
        model, replicas = "", dict[str, dict[str, float]]()
        try:
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except ValueError as error:
            raise InvalidRequest(f"{server.address}/metrics is no text of Prometheus: {error}") from error
        names_engines = any("engine" in sample.labels for sample in samples)
        for sample in samples:
            if names_engines and "engine" not in sample.labels:
                continue  # a sample of the server as a whole
            prefix, _, name = sample.name.rpartition(":")
            if prefix not in ("octavo", "vllm") or sample.labels.get("tier", "device") != "device":
                continue
            if not math.isfinite(sample.value):
                continue
            model = sample.labels.get("model_name", model)
            role = sample.labels.get("role")
            replica = sample.labels.get("engine", "0") + (f" {role}" if role else "")
            values = replicas.setdefault(replica, {})
            values[f"{prefix}:{name}"] = values.get(f"{prefix}:{name}", 0.0) + sample.value
        if not replicas:
            raise InvalidRequest(f"{server.address}/metrics has no metrics of octavo or vLLM")
        return cls(model, replicas, time.monotonic())

    def of(self, replica: str, name: str) -> float:
        """Return a value by its name without prefix; 0 if it does not exist."""
        values = self.replicas.get(replica, {})
        return values.get(f"octavo:{name}", values.get(f"vllm:{name}", 0.0))


def loads(before: Counters, after: Counters) -> list[Load]:
    """Return the load of each replica and, if there are several, last that of all together."""
    seconds = max(after.read_s - before.read_s, 1e-3)

    def load(label: str, replicas: list[str]) -> Load:
        def total(name: str) -> float:
            return sum(after.of(each, name) for each in replicas)

        def gained(name: str) -> float:
            # a restarted server counts from 0
            return sum(max(0.0, after.of(each, name) - before.of(each, name)) for each in replicas)

        queries = gained("prefix_cache_queries_total")
        return Load(
            replica=label,
            running=int(total("num_requests_running")),
            waiting=int(total("num_requests_waiting")),
            swapped=int(total("num_requests_swapped")),
            kv_cache_usage=total("kv_cache_usage_perc") / len(replicas),
            prompt_tokens_per_s=gained("prompt_tokens_total") / seconds,
            generated_tokens_per_s=gained("generation_tokens_total") / seconds,
            prefix_hit_rate=gained("prefix_cache_hits_total") / queries if queries else None,
            preemptions=int(total("num_preemptions_total")),
            num_paused=int(total("cores_paused")),
            num_sleeping=int(total("cores_sleeping")),
        )

    names = sorted(after.replicas)
    found = [load(name, [name]) for name in names]
    return found if len(names) == 1 else [*found, load("all", names)]


async def _recent(server: OpenAIClient) -> list[Timeline]:
    """Return the timelines of the most recently finished requests; an empty list if the server lacks the endpoint."""
    try:
        found = msgspec.json.decode(await server.get("/scheduler/timelines"), type=TimelineList)
        return found.timelines[-_NUM_RECENT:][::-1]
    except (InvalidRequest, ValueError, RecursionError):
        return []


def line(load: Load) -> str:
    """Return the load in one line."""
    hits = "" if load.prefix_hit_rate is None else f", {load.prefix_hit_rate:.0%} prefix hits"
    return (
        f"{load.running} running, {load.waiting} waiting, {load.swapped} swapped; KV {load.kv_cache_usage:.0%}; "
        f"{load.prompt_tokens_per_s:,.0f} prompt and {load.generated_tokens_per_s:,.0f} generated tokens/s{hits}; "
        f"{load.preemptions} preemptions{load.held and f'; {load.held}'}"
    )


def frame(address: str, model: str, found: list[Load], history: deque[float], recent: list[Timeline]) -> str:
    """Return the text of the screen: a table of replicas, generated tokens per second, and recent requests."""
    rows = [("replica", "run", "wait", "swap", "KV cache", "prompt/s", "tokens/s", "hits", "preempted")]
    for each in found:
        bar = render_bar([each.kv_cache_usage], 10)
        hits = "" if each.prefix_hit_rate is None else f"{each.prefix_hit_rate:.0%}"
        counts = (str(each.running), str(each.waiting), str(each.swapped))
        rates = (f"{each.prompt_tokens_per_s:,.0f}", f"{each.generated_tokens_per_s:,.0f}")
        rows.append((each.replica, *counts, f"{bar} {each.kv_cache_usage:4.0%}", *rates, hits, f"{each.preemptions:,}"))
    width = max(10, min(60, columns(sys.stdout) - 24))
    chart = sparkline(list(history)[-width:])
    parts = [
        f"{model} at {address}   {time.strftime('%H:%M:%S')}   Ctrl-C ends",
        render_table(rows),
        *([f"  {found[-1].held}"] if found[-1].held else []),
        f"  tokens/s  {chart}  at most {max(history):,.0f}",
    ]
    return "\n\n".join(parts + ([_ended(recent)] if recent else []))


def _ended(recent: list[Timeline]) -> str:
    rows: list[tuple[str, ...]] = [("finished", "prompt", "cached", "generated", "preempted", "seconds")]
    for each in recent:
        counts = map(str, (each.prompt_tokens, each.cached_tokens, each.completion_tokens, each.preemptions))
        seconds = each.events[-1].time - each.events[0].time if each.events else 0.0
        rows.append((each.request_id[:28], *counts, f"{seconds:,.2f}"))
    return render_table(rows)
