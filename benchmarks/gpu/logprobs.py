"""Log-probabilities and logits processors on the GPU: beside their definitions, in other batches, and their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.sampler import BenchmarkSequence
from octavo import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.devices.cuda.sampler import CudaSampler, read_later
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.filters import default_filters
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors import ProcessedRow, default_processors

DEVICE: Final = "cuda"
RUNS: Final = 7
VOCAB_SIZE: Final = 151_936
ROWS, TURNS, LENGTH = 64, 16, 2048
PROCESSED: Final[dict[str, dict[str, Any]]] = {
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": -0.2},
    "biases": {"logit_bias": {token: token / 7 for token in range(100)}},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 10))},
    "bad words": {"bad_words": ("x",)},
    "min_tokens": {"min_tokens": 4096, "max_tokens": 4096},
}


def sampler() -> CudaSampler:
    """Return a sampler with all processors and filters."""
    return CudaSampler(CudaRuntime(), torch.device(DEVICE), read_later, default_processors(), default_filters())


@dataclass(eq=False)
class Stored(BenchmarkSequence):
    """A sequence whose tokens are on the GPU."""

    store: Tensor = field(default_factory=lambda: torch.zeros(0))

    def stored_tokens(self) -> Tensor:
        """Return the tokens of all sequences."""
        return self.store


def rows_of(num_rows: int, **params: Any) -> list[SamplingRow]:
    """Return rows of sequences of 2,048 tokens, of which 256 are a prompt, each with a seed of its own."""
    known = np.random.default_rng(0).zipf(1.3, (num_rows, LENGTH)) % VOCAB_SIZE
    tokens = known.astype(np.int32)
    there = torch.from_numpy(tokens).to(DEVICE)
    rows = []
    for seed, line in enumerate(tokens):
        asked = SamplingParams(seed=seed, **params)
        words = tuple((*line[LENGTH - size :].tolist(), 7 * size) for size in range(1, 4))
        sequence = Stored(0, asked, line, 256, (0, 2), words, seed, there)
        rows.append(SamplingRow(sequence, LENGTH))
    return rows


def seconds(function: Callable[[], Any]) -> float:
    """Return the median time of a call, after two others."""
    found = []
    for turn in range(RUNS + 2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        if turn >= 2:
            found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found)


def logprobs() -> Iterator[dict[str, Any]]:
    """Yield how many of 1,024 rows are described and processed as by the definitions, and the times for 1 and 64."""
    yield from checked()
    yield from processed()
    device = sampler()
    for rows in (1, ROWS):
        logits = torch.randn(rows, VOCAB_SIZE, device=DEVICE)
        for name, params in {"none": {}, "0": {"logprobs": 0}, "20": {"logprobs": 20}, **PROCESSED}.items():
            asked = rows_of(rows, **params)
            launched = seconds(lambda a=asked, x=logits: device.launch(x.clone(), a))
            waiting = seconds(lambda a=asked, x=logits: ReferenceSampler().sample(x.clone(), a))
            yield {"launched draws": name, "rows": rows, "us": launched * 1e6, "reference_us": waiting * 1e6}


def checked() -> Iterator[dict[str, Any]]:
    """Yield equal rows: the float64 log-probabilities rounded once, ties by their ids; the reference's tokens."""
    torch.manual_seed(0)
    device, reference, asked = sampler(), ReferenceSampler(), rows_of(ROWS, logprobs=20)
    equal = {"tokens": 0, "ranks": 0, "top_ids": 0, "values": 0, "alone": 0, "described": 0}
    largest = 0.0
    for turn in range(TURNS):
        logits = torch.randn(ROWS, VOCAB_SIZE, device=DEVICE) * (1 + turn % 5)
        logits = logits.bfloat16().float() if turn % 2 else logits
        found = [each.tokens[0] for each in device.launch(logits, asked).wait()]
        theirs = [each.tokens[0] for each in reference.sample(logits.clone(), asked)]
        exact, order = (each.cpu() for each in defined(logits))
        ranks = (logits > logits.gather(1, torch.tensor([[each.token_id] for each in found], device=DEVICE))).sum(1) + 1
        for row, (one, other) in enumerate(zip(found, theirs, strict=True)):
            equal["tokens"] += one.token_id == other.token_id
            equal["ranks"] += one.rank == int(ranks[row])
            equal["top_ids"] += one.top_ids == order[row].tolist()
            values = exact[row, [one.token_id, *one.top_ids]].tolist()
            equal["values"] += [one.logprob, *one.top_logprobs] == values
            largest = max(largest, difference(one, other))
        for row in range(0, ROWS, 8):
            alone = logits[row : row + 1]
            equal["alone"] += device.launch(alone, asked[row : row + 1]).wait()[0].tokens == [found[row]]
            equal["described"] += device.describe(alone, [found[row].token_id], 20) == [found[row]]
    yield {"log-probabilities": "equal", **equal, "of": ROWS * TURNS, "alone_of": ROWS // 8 * TURNS}
    yield {"log-probabilities": "largest difference from the reference", "is": largest}


def processed() -> Iterator[dict[str, Any]]:
    """Yield of how many of 1,024 rows all logits have the bits of the processors on the CPU, and how many are drawn as
    by the reference there; and of one in 8 alone."""
    device, reference = sampler(), ReferenceSampler()
    for name, params in PROCESSED.items():
        asked, equal = rows_of(ROWS, **params), {"logits": 0, "tokens": 0, "alone": 0}
        (processor,) = (each for each in default_processors() if each.needs(asked[0].sequence.params))
        for turn in range(TURNS):
            before = torch.randn(ROWS, VOCAB_SIZE, device=DEVICE) * (1 + turn % 5)
            after, expected = before.clone(), before.clone().cpu()
            found = device.launch(after, asked).wait()
            processor.update([ProcessedRow(place, row) for place, row in enumerate(asked)])
            processor.apply(expected)
            equal["logits"] += int((after.cpu() == expected).all(dim=1).sum())
            theirs = reference.sample(before.clone().cpu(), asked) if turn < 2 else found
            equal["tokens"] += sum(one == other for one, other in zip(found, theirs, strict=True))
            for row in range(0, ROWS, 8):
                alone = device.launch(before[row : row + 1].clone(), asked[row : row + 1]).wait()
                equal["alone"] += alone == [found[row]]
        yield {"processed": name, **equal, "of": ROWS * TURNS, "alone_of": ROWS // 8 * TURNS}


def defined(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 log-probabilities rounded to float32 [rows, vocab], and the ids of the 20 likeliest [rows, 20]."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :20]
    return torch.log_softmax(logits.double(), dim=-1).float(), order


def difference(one: TokenLogprobs, other: TokenLogprobs) -> float:
    """Return the largest difference between log-probabilities, of those in the same places."""
    mine, theirs = ([each.logprob or 0.0, *each.top_logprobs] for each in (one, other))
    return max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) if one.token_id == other.token_id else 0.0
