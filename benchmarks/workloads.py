"""The workloads that engines are compared on, and the figures that are made of one run of a workload.

Prompts are random tokens, new ones in every repetition: a prefix is found again only where a workload says so.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.errors import ConfigError, suggestion

_SPARE_TOKENS = 64
"""What a prompt that is cut leaves of the context, for its output."""
_FIRST_TOKEN, _LAST_TOKEN = 10, 24_000
"""Prompts are made of ordinary tokens: special ones come first in many vocabularies, padding last."""
_SHORTEST_GAP_S = 3e-4
"""Some engines hand over the tokens of one step one by one; times closer than this are one step."""

Event = tuple[float, int, int]
"""When new tokens could be seen, in seconds of any steady clock; the number of their request; how many they are."""
Figures = dict[str, float]
Summary = dict[str, dict[str, float]]
"""Figure → median, minimum and maximum over the repetitions."""


@dataclass(frozen=True)
class Workload:
    """`num_requests` that arrive together. The first `shared_len` of their `prompt_len` tokens are the same."""

    name: str
    num_requests: int
    prompt_len: int
    output_len: int
    shared_len: int = 0

    def fitted(self, max_model_len: int) -> Workload:
        """With prompts cut to a context that is too short for them. Raises ConfigError where that makes no sense."""
        if self.prompt_len + self.output_len <= max_model_len:
            return self
        prompt_len = max_model_len - _SPARE_TOKENS
        if prompt_len <= self.shared_len or self.output_len > _SPARE_TOKENS:
            raise ConfigError(
                f"workload {self.name} has {self.prompt_len} + {self.output_len} tokens per request, the context is "
                f"{max_model_len}; leave it out of --workloads"
            )
        return replace(self, prompt_len=prompt_len)

    def prompts(self, vocab_size: int, repetition: int, variant: int = 0) -> list[list[int]]:
        """Token ids. Another `variant` has the same shared part and other endings."""
        shared = self._tokens(f"{self.name}/{repetition}", self.shared_len, vocab_size)
        return [
            shared
            + self._tokens(f"{self.name}/{repetition}/{variant}/{i}", self.prompt_len - self.shared_len, vocab_size)
            for i in range(self.num_requests)
        ]

    def _tokens(self, seed: str, length: int, vocab_size: int) -> list[int]:
        source = random.Random(seed)
        return [source.randrange(_FIRST_TOKEN, min(_LAST_TOKEN, vocab_size)) for _ in range(length)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("A", 1, 128, 128),
        Workload("B", 32, 128, 64),
        Workload("C1", 1, 2048, 1),
        Workload("C8", 8, 512, 1),
        Workload("D", 4, 2048, 32),
        Workload("E", 16, 1024 + 32, 16, shared_len=1024),
    )
}
"""A: one conversation. B: a full house. C1, C8: prefill. D: decoding over long contexts. E: a shared system prompt."""


def named_workloads(names: str) -> list[Workload]:
    """The workloads of a list such as "A,C1". Raises ConfigError for a name that is none."""
    found = []
    for name in (each.strip() for each in names.split(",")):
        if name not in WORKLOADS:
            raise ConfigError(
                f"{name!r} is not a workload{suggestion(name, WORKLOADS)}; there are {', '.join(WORKLOADS)}"
            )
        found.append(WORKLOADS[name])
    return found


def figures(workload: Workload, began: float, events: Sequence[Event], ended: float) -> Figures:
    """Seconds and tokens per second of one run. Raises ValueError unless every request got exactly its tokens.

    ttft: time to the first token, of the first and the last request to have one, and the mean. prefill_tps: prompt
    tokens over ttft_last. decode_tps: tokens after that moment over the time they took. step_ms: median of that time's
    steps.
    """
    first: dict[int, float] = {}
    counts = [0] * workload.num_requests
    for at, request, num_tokens in events:
        first.setdefault(request, at)
        counts[request] += num_tokens
    if any(count != workload.output_len for count in counts):
        raise ValueError(f"requests got {sorted(set(counts))} tokens, each was to get {workload.output_len}")
    elapsed, num_prompt = ended - began, workload.num_requests * workload.prompt_len
    last_first = max(first.values())
    found = {
        "wall": elapsed,
        "ttft_first": min(first.values()) - began,
        "ttft_mean": statistics.fmean(first.values()) - began,
        "ttft_last": last_first - began,
        "out_tps": sum(counts) / elapsed,
        "total_tps": (sum(counts) + num_prompt) / elapsed,
        "prefill_tps": num_prompt / (last_first - began),
    }
    last = max(at for at, _, _ in events)
    if last > last_first:
        found["decode_tps"] = sum(num for at, _, num in events if at > last_first) / (last - last_first)
    moments = sorted({at for at, _, _ in events if at >= last_first})
    gaps = [later - at for at, later in itertools.pairwise(moments) if later - at > _SHORTEST_GAP_S]
    if gaps:
        found["step_ms"] = 1e3 * statistics.median(gaps)
    return found


def summarize(repetitions: Sequence[Figures]) -> Summary:
    """Median, minimum and maximum of each figure; one that a repetition lacks counts over the others."""
    names = dict.fromkeys(name for repetition in repetitions for name in repetition)
    summary = {}
    for name in names:
        values = [repetition[name] for repetition in repetitions if name in repetition]
        summary[name] = {"med": statistics.median(values), "min": min(values), "max": max(values)}
    return summary
