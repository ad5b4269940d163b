"""Decode steps whose launches overlap (programmatic dependent launch), beside ordinary ones, on a GPU from Hopper on.

`python -m benchmarks.gpu.run_all --parts overlap` times steps of models as CUDA graphs, without draws, and whole
engines. Both ways must give the same bits. Each step of a graph has other tokens than the one before: a kernel that
read too early would read what was right for those.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.gpu.figures import BOTH, WAYS, decode, opened, prompts_of, sizes
from benchmarks.gpu.kept import kept
from benchmarks.gpu.persistent import MODELS, batch_of, logits_of, open_model
from benchmarks.gpu.small import microseconds
from benchmarks.models import CONFIGS
from octavo import LLM, SamplingParams
from octavo.attention.metadata import ModelInput
from octavo.devices import DEVICES
from octavo.devices.cuda.attention import RotatingCudaBackend
from octavo.devices.cuda.device import CudaDevice
from octavo.devices.cuda.runtime import CudaRuntime, Launcher, launch_by_triton
from octavo.models.decoder import DecoderStack

DEPENDENT: Final = frozenset(
    {
        *("attention.attend", "attention.merge", "elementwise.elementwise", "linear.chunks_at_once", "linear.linear"),
        *("rows.rms_norm", "rows.rotate_and_store"),
    }
)
"""Kernels of decode steps whose programs all wait for earlier launches (`kernels/dependent.py`)."""


def overlapping(launch: Launcher) -> Launcher:
    """Return a launcher whose launches of `DEPENDENT` begin while earlier ones run, for capabilities from 9.0 on.

    `launch_pdl` is Triton's option for programmatic dependent launch.
    """

    def launch_early(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel in DEPENDENT:
            constants |= {"IS_DEPENDENT": True, "launch_pdl": True}
        launch(kernel, grid, *arguments, **constants)

    return launch_early


LAUNCHERS: Final[dict[str, Launcher]] = {"ordinary": launch_by_triton, "overlapping": overlapping(launch_by_triton)}
ROWS, LENGTH = (1, 16, 64), 224
_TURNS, _REPLAYS = 2, 50


class OverlappingCuda(CudaDevice):
    """The device with launches that overlap."""

    def launcher(self, is_invariant: bool) -> Launcher:
        return overlapping(super().launcher(is_invariant))


@contextmanager
def device_with(launches: str) -> Iterator[None]:
    """Let engines on the device cuda launch in one of the ways of `LAUNCHERS`."""
    device = {"ordinary": CudaDevice, "overlapping": OverlappingCuda}[launches]
    with patch.dict(DEVICES, {"cuda": f"{device.__module__}.{device.__name__}"}):
        yield


class ChosenLauncher:
    """A `Launcher` that is one of `LAUNCHERS`, the one that was chosen last."""

    def __init__(self) -> None:
        self.chosen = "ordinary"

    def __call__(self, kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        LAUNCHERS[self.chosen](kernel, grid, *arguments, **constants)


def unequal_steps(model: DecoderStack, batch: ModelInput, launcher: ChosenLauncher) -> int:
    """Return how many of `_REPLAYS` steps with other tokens, replayed from a graph whose launches overlap, have other
    logits than those of ordinary launches, or other keys and values."""
    vocab_size, count = model.config.vocab_size, len(batch.token_ids)
    every = [(torch.arange(count) * 7 + 13 * turn) % vocab_size for turn in range(_REPLAYS)]

    def sums() -> list[torch.Tensor]:
        return [cache.view(torch.int16).sum(dtype=torch.int64) for cache in batch.kv_caches]

    launcher.chosen = "ordinary"
    expected: list[list[torch.Tensor]] = []
    for ids in every:
        batch.token_ids.copy_(ids)
        expected.append([logits_of(model, model, batch).clone(), *sums()])
    launcher.chosen = "overlapping"
    logits_of(model, model, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = logits_of(model, model, batch)
    launcher.chosen, num_unequal = "ordinary", 0
    for ids, right in zip(every, expected, strict=True):
        batch.token_ids.copy_(ids)
        graph.replay()
        num_unequal += not all(map(torch.equal, [found, *sums()], right))
    return num_unequal


@torch.inference_mode()
def steps(limits: Mapping[str, float], name: str, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield of steps of a model without draws how many differ, and their times with the floor's share of them."""
    dtype, length = torch.bfloat16, LENGTH
    for is_invariant in (way == "batch invariant" for way in ways):
        launcher = ChosenLauncher()
        runtime, (read, _, kv_bytes) = CudaRuntime(is_invariant, launcher), sizes(CONFIGS[name])
        model = open_model(CONFIGS[name], dtype, "cuda", runtime.bind(), RotatingCudaBackend(runtime, dtype))
        for num_rows in ROWS:
            batch = batch_of(model, [length] * num_rows, dtype, "cuda")
            shape = {"batch_invariant": is_invariant, "rows": num_rows}
            yield {**shape, "unequal": unequal_steps(model, batch, launcher), "of": _REPLAYS}
            taken: dict[str, list[float]] = {each: [] for each in LAUNCHERS}
            for _, each in product(range(_TURNS), LAUNCHERS):
                launcher.chosen = each
                taken[each].append(microseconds(partial(logits_of, model, model, batch)) / 1e3)
            floor_ms = (2 * read + kv_bytes * num_rows * length) / limits["bytes_per_s"] * 1e3
            times = {f"{each}_ms": statistics.median(found) for each, found in taken.items()}
            shares = {f"{each}_of_floor": floor_ms / statistics.median(found) for each, found in taken.items()}
            yield {**shape, **times, "floor_ms": floor_ms, **shares}


def engines(limits: Mapping[str, float], name: str, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield whether whole engines of a model answer the same, and the times of their decode steps."""
    for way in ways:
        expected: list[Any] | None = None
        for launches in LAUNCHERS:
            with device_with(launches), opened(name, "cuda", WAYS[way]) as llm:
                about = {"way": way, "launches": launches}
                found = answers(llm, CONFIGS[name]["vocab_size"])
                expected = expected or found
                yield {**about, "as_ordinary": found == expected}
                for batch in ROWS:
                    yield {**about, **decode(llm, CONFIGS[name], batch, limits)}


def answers(llm: LLM, vocab_size: int) -> list[Any]:
    """Return tokens and log-probabilities of prompts of many lengths."""
    prompts = prompts_of([1 + 37 * row for row in range(16)], vocab_size)
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=1, logprobs=1, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


def overlap(limits: Mapping[str, float], models: Sequence[str] = MODELS) -> Iterator[dict[str, Any]]:
    """Yield all of them, model by model: the large ones, which take long, one way only."""
    for name in models:
        ways = BOTH if name == models[0] else BOTH[:1]
        yield from kept({"overlap": name}, partial(steps, limits, name, ways))
        yield from kept({"overlap": name}, partial(engines, limits, name, ways))
