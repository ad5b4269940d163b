"""The parts of `benchmarks.gpu.run_all`, which runs this module in a process of its own.

Each prints JSON lines: kernels beside the reference, bits in other cuts, shares of the bandwidth and of the matrix rate
that this GPU reaches in the same run, and whole engines beside the device reference. Times are medians of `RUNS`, by
events of the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby, islice
from multiprocessing import get_context
from typing import Any, Final

import numpy as np
import torch
import triton
from torch import Tensor

from benchmarks.gpu.binaries import binaries
from benchmarks.gpu.exactness import OTHERS, WAYS, exactness
from benchmarks.gpu.figures import figures
from benchmarks.gpu.kept import failure_of, kept
from benchmarks.gpu.logprobs import logprobs
from benchmarks.gpu.overlap import overlap
from benchmarks.gpu.persistent import persistent
from benchmarks.gpu.ranks import ranks
from benchmarks.gpu.small import small
from benchmarks.gpu.start import start
from benchmarks.gpu.swaps import swaps
from benchmarks.gpu.tiles import CODES, tiles
from benchmarks.sampler import BenchmarkSequence
from octavo import LLM, SamplingParams
from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.attention import CudaBackend, RotatingCudaBackend
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.devices.cuda.sampler import CudaSampler, read_later
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.ops.registry import operators
from octavo.ops.rotary import Rotation, rotary_table
from octavo.sampling.filters import default_filters
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors import default_processors

RUNS: Final = 7
AHEAD_CYCLES: Final = 4_000_000
"""Some 2 ms."""
INVARIANT, FASTEST = CudaRuntime(is_invariant=True), CudaRuntime()
PROCESSES, SHARES = 12, 6
"""Processes that check operators, and parts of the examples of operators in `CODED`."""
CODED: Final = ("prepare_coded", "prepare_quantized")
PRODUCTS: Final = ((1000, 4096), (1024, 2048), (4096, 4096), (4096, 1024))
"""Outputs and inputs of weights, whose inputs are 8 chunks, 4, 2 and one: a row alone is computed in other ways."""
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
"""Those of Qwen3-8B."""


def seconds(function: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU, after two others. It waits until the host has launched all."""
    for _ in range(2):
        function()
    found = []
    for _ in range(RUNS):
        torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found)


def moved(value: Any) -> Any:
    """Return a tensor, or what has some (a mapping, a tuple, the metadata of a step), on the GPU; else the same."""
    if isinstance(value, dict):
        return {name: moved(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return value._make(map(moved, value)) if hasattr(value, "_make") else tuple(map(moved, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: moved(getattr(value, each.name)) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **fields)
    return value.cuda() if isinstance(value, Tensor) else value


def ceilings() -> dict[str, float]:
    """Return what copies and products of this GPU reach: bytes and operations per second."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"bytes_per_s": 2 * x.nbytes / seconds(lambda: y.copy_(x)), "flops": 2 * 8192**3 / seconds(lambda: a @ b)}


def check_operators(processes: int = PROCESSES) -> Iterator[dict[str, Any]]:
    """Yield the largest difference of each kernel from the reference, as a share of what is allowed, or why it failed.

    Most of the time goes into the compilation of some 500 variants: processes do this beside each other.
    """
    # products of codes have by far the most variants to be compiled
    chosen = [each.operator for each in INVARIANT.bind().choices if each.implementation == "triton"]
    chosen.sort(key=lambda name: name in CODED)
    dtypes = [(name, dtype) for name in chosen for dtype in operators()[name].tolerance]
    shares = [(name, dtype, part) for name, dtype in dtypes for part in range(SHARES if name in CODED else 1)]
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        results = zip(shares, pool.map(checked, shares), strict=True)
        for (name, dtype), group in groupby(results, lambda each: each[0][:2]):
            yield {"operator": name, "dtype": str(dtype), **merged([found for _, found in group])}


def merged(found: Sequence[float | str]) -> dict[str, Any]:
    """Return the largest of what `checked` returns, or a failure where there is one."""
    failures = [each for each in found if isinstance(each, str)]
    return {"failed": failures[0]} if failures else {"of_allowed": max(found)}


def checked(share: tuple[str, torch.dtype, int]) -> float | str:
    """Return what `check_operators` yields for a part of the examples of an operator. share: its name, the type of the
    examples, and which part of them."""
    name, dtype, part = share
    operator, ops, worst = operators()[name], INVARIANT.bind(), 0.0
    try:
        for arguments in islice(operator.examples(dtype), part, None, SHARES if name in CODED else 1):
            placed = [moved(each) for each in arguments]
            found, expected = (
                (each,) if isinstance(each, Tensor) else each
                for each in (
                    operator.trial(getattr(ops, name), *placed),
                    operator.trial(operator.reference, *arguments),
                )
            )
            for one, other in zip(found, expected, strict=True):
                difference = (one.cpu().double() - other.double()).abs() / (1 + other.double().abs())
                worst = max(worst, float(difference.max()))
    except Exception as error:  # the other operators are still of use
        return failure_of(error)
    return worst / operator.tolerance[dtype]


def step(rows: int, queries: int, length: int) -> tuple[AttentionMetadata, Tensor, Tensor, Tensor, Tensor]:
    """Return metadata, q, k, v and a cache of equal rows."""
    blocks = -(-length // BLOCK)
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(rows)]
    metadata = moved(AttentionMetadata.build([queries] * rows, [length] * rows, tables, BLOCK))
    q, k, v = (
        torch.randn(rows * queries, heads, DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = torch.randn(2, rows * blocks + 1, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    return metadata, q, k, v, cache


def check_bits() -> Iterator[dict[str, Any]]:
    """Yield whether bits are the same in other cuts: of attention, of products, and of what one launch does of two."""
    torch.manual_seed(0)
    yield from kept({"bits": "attention"}, bits_of_attention)
    yield from kept({"bits": "products"}, bits_of_products)
    yield from kept({"bits": "rotation with the write to the cache"}, lambda: [{"equal": rotation_is_equal()}])


def bits_of_attention() -> Iterator[dict[str, Any]]:
    """Yield whether a token's bits are those of a whole prompt when it is computed alone."""
    backend, length = CudaBackend(INVARIANT, torch.bfloat16), 3000
    metadata, q, k, v, cache = step(1, length, length)
    whole = backend.run(q, k, v, cache, metadata, Scores(DIM**-0.5))
    for position in (0, 17, 511, 512, 1500, length - 1):
        table = metadata.block_tables[:, : -(-(position + 1) // BLOCK)].tolist()
        one = moved(AttentionMetadata.build([1], [position + 1], table, BLOCK))
        here = slice(position, position + 1)
        alone = backend.run(q[here], k[here], v[here], cache, one, Scores(DIM**-0.5))
        yield {"position": position, "equal": bool(torch.equal(alone[0], whole[position]))}


def bits_of_products() -> Iterator[dict[str, Any]]:
    """Yield how many rows of a product have the bits of the same row alone, whose chunks are computed in other ways."""
    for outputs, inputs in PRODUCTS:
        x, weight = (torch.randn(size, inputs, device="cuda", dtype=torch.bfloat16) for size in (300, outputs))
        for name, runtime in (("triton", INVARIANT), ("cublas", FASTEST)):
            linear = runtime.bind().prepare_linear(weight)
            together = linear(x)
            equal = sum(bool(torch.equal(linear(x[row : row + 1])[0], together[row])) for row in range(0, 300, 30))
            yield {"by": name, "shape": (outputs, inputs), "equal_rows": equal, "of": 10}


def rotation_is_equal() -> bool:
    """Return whether heads that are rotated and written by one launch have the bits of two."""
    metadata, q, k, v, cache = step(64, 1, 1024)
    norm, positions = torch.randn(DIM, device="cuda", dtype=torch.bfloat16), torch.arange(64, device="cuda") * 9
    table = rotary_table(1e6 ** -(torch.arange(0, DIM, 2, device="cuda") / DIM), 1024)
    rotation, caches = Rotation(positions, table, table, norm, norm, (1e-6, 0.0), False), (cache, cache.clone())
    expected, turned = rotation.of(FASTEST.bind().rotary, q, k)
    CudaBackend(FASTEST, torch.bfloat16).run(expected, turned, v, caches[0], metadata, Scores(0.1))
    found = RotatingCudaBackend(FASTEST, torch.bfloat16).rotate_and_store(q, k, v, caches[1], metadata, rotation)
    return bool(torch.equal(found, expected)) and bool(torch.equal(*caches))


def time_kernels(limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield shares of the ceilings."""
    for rows, length in ((1, 4096), (1, 32_768), (64, 1024), (64, 4096)):
        metadata, q, k, v, cache = step(rows, 1, length)
        read = 2 * rows * length * KV_HEADS * DIM * 2
        backend = CudaBackend(FASTEST, torch.bfloat16)
        taken = seconds(lambda m=metadata, c=cache, q=q, k=k, v=v, b=backend: b.run(q, k, v, c, m, Scores(0.1)))
        share = read / taken / limits["bytes_per_s"]
        yield {"attention": "decode", "rows": rows, "length": length, "us": taken * 1e6, "of_bandwidth": share}
    for length in (2048, 8192):
        metadata, q, k, v, cache = step(1, length, length)
        for name, runtime in (("fastest", FASTEST), ("invariant", INVARIANT)):
            backend = CudaBackend(runtime, torch.bfloat16)
            taken = seconds(lambda m=metadata, c=cache, q=q, k=k, v=v, b=backend: b.run(q, k, v, c, m, Scores(0.1)))
            share = 2 * length**2 * HEADS * DIM / taken / limits["flops"]
            yield {"attention": f"prompt, {name}", "length": length, "us": taken * 1e6, "of_matrix_rate": share}
    weight = torch.randn(12_288, 4096, device="cuda", dtype=torch.bfloat16)
    for tokens in (1, 16, 64, 512, 2048):
        x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
        linears = {"cublas": FASTEST.bind().prepare_linear(weight), "triton": INVARIANT.bind().prepare_linear(weight)}
        taken = {name: seconds(lambda linear=linear, x=x: linear(x)) for name, linear in linears.items()}
        yield {
            "linear": "4096 to 12288",
            "tokens": tokens,
            **{f"{name}_us": each * 1e6 for name, each in taken.items()},
            "of_bandwidth": weight.nbytes / taken["triton"] / limits["bytes_per_s"],
            "of_matrix_rate": 2 * tokens * weight.numel() / taken["triton"] / limits["flops"],
        }
        for name, spec in CODES.items():
            coded = FASTEST.bind().prepare_quantized(spec)(weight)
            took = seconds(lambda linear=coded, x=x: linear(x))
            share = coded.nbytes / took / limits["bytes_per_s"]
            yield {"linear": name, "tokens": tokens, "us": took * 1e6, "of_bandwidth": share}


def gpu_sampler() -> CudaSampler:
    """Return a sampler with all processors and filters."""
    return CudaSampler(FASTEST, torch.device("cuda"), read_later, default_processors(), default_filters())


def asked_rows(num_rows: int, **params: Any) -> list[SamplingRow]:
    """Return rows of sequences of 256 tokens, each with a seed of its own."""
    known = np.arange(256, dtype=np.int32)
    each = (SamplingParams(seed=seed, **params) for seed in range(num_rows))
    return [SamplingRow(BenchmarkSequence(0, one, known), 256) for one in each]


PLAIN: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 5.0},
}
FILTERED: Final[dict[str, dict[str, Any]]] = {
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 200, "top_p": 0.95, "min_p": 0.001, "temperature": 1.5},
    "wide": {"top_p": 0.99, "temperature": 30.0},
}


def check_sampler() -> Iterator[dict[str, Any]]:
    """Yield how many of 25,600 rows of each kind are launched as the reference draws them: on the GPU, without the
    kernels of launches, and 256 of them on the CPU."""
    torch.manual_seed(0)
    sampler, reference, rows = gpu_sampler(), ReferenceSampler(), 64
    for name, params in (PLAIN | FILTERED).items():
        asked, found = asked_rows(rows, **params), {"gpu": 0, "cpu": 0}
        for turn in range(400):
            logits = torch.randn(rows, 32_768, device="cuda") * (1 + turn % 5)
            tokens = [each.tokens for each in sampler.launch(logits, asked).wait()]
            on_cpu = reference.sample(logits.cpu(), asked) if turn < 4 else []
            for where, results in (("gpu", ReferenceSampler.sample(sampler, logits.clone(), asked)), ("cpu", on_cpu)):
                found[where] += sum(one == each.tokens for one, each in zip(tokens, results, strict=False))
        yield {"draws": name, "equal_on_gpu": found["gpu"], "of": 25_600, "equal_on_cpu": found["cpu"], "among": 256}


def time_sampler(limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the time of drawing a token for each row, and the share of the bandwidth that reading the logits takes."""
    sampler = gpu_sampler()
    for rows in (1, 64):
        logits = torch.randn(rows, 151_936, device="cuda")
        for name, params in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("plain", SamplingParams(seed=1)),
            ("top-k and top-p", SamplingParams(seed=1, top_k=50, top_p=0.9)),
            ("log-probabilities", SamplingParams(seed=1, logprobs=5)),
        ):
            known = np.arange(256, dtype=np.int32)
            asked = [SamplingRow(BenchmarkSequence(0, params, known), 256) for _ in range(rows)]
            taken = seconds(lambda a=asked, x=logits: sampler.sample(x.clone(), a))
            share = logits.nbytes / taken / limits["bytes_per_s"]
            yield {"sampler": name, "rows": rows, "us": taken * 1e6, "of_bandwidth": share}
        for name, filters in (PLAIN | FILTERED).items():
            launched = asked_rows(rows, **filters)
            taken = seconds(lambda a=launched, x=logits: sampler.launch(x, a))
            share = logits.nbytes / taken / limits["bytes_per_s"]
            yield {"launched draws": name, "rows": rows, "us": taken * 1e6, "of_bandwidth": share}


def engines() -> Iterator[dict[str, Any]]:
    """Yield tokens of the shipped model beside those of the device reference, and tokens per second."""
    prompts: Any = ["Once upon a time", "The little dog", "One day"] * 8
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=1, ignore_eos=True)
    expected: list[Any] | None = None
    fastest = {"device": "cuda", "kv_cache_memory": "64MiB"}
    exact = fastest | {"batch_invariant": True}
    for args in (
        {"device": "reference"},
        exact,
        exact | {"enforce_eager": True},
        fastest,
        fastest | {"enforce_eager": True},
    ):
        begun = time.monotonic()
        with LLM("octavo-tiny", dtype="bfloat16", **args) as llm:
            started = time.monotonic() - begun
            llm.generate(prompts[:1], params, use_tqdm=False)
            begun = time.monotonic()
            tokens = [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]
            taken = time.monotonic() - begun
            alone = [llm.generate([each], params, use_tqdm=False)[0].outputs[0].token_ids for each in prompts[:3]]
        expected = expected or tokens
        yield {
            "engine": args,
            "start_s": started,
            "tokens_per_s": sum(map(len, tokens)) / taken,
            "alone_equal": alone == tokens[:3],
            "as_the_reference": sum(one == other for one, other in zip(tokens, expected, strict=True)) / len(tokens),
        }


def peers() -> Iterator[dict[str, Any]]:
    """Yield the decode steps of transformers, which need not be installed."""
    from benchmarks.gpu.peers import steps

    return steps("qwen3-0.6b", (1, 64), "cuda")


LIMITS: Final[dict[str, float]] = {}
"""What `ceilings` returns, for the parts that time something."""
PARTS: Final[dict[str, Callable[[], Iterator[dict[str, Any]]]]] = {
    "operators": check_operators,
    "bits": check_bits,
    "sampler": check_sampler,
    "engines": engines,
    "binaries": binaries,
    "start": start,
    "exact-ways": partial(exactness, WAYS, is_one=True),
    "other-ways": partial(exactness, OTHERS, is_one=False),
    "swaps": swaps,
    "logprobs": logprobs,
    "ranks": ranks,
    "kernel-times": partial(time_kernels, LIMITS),
    "small": small,
    "tiles": tiles,
    "sampler-times": partial(time_sampler, LIMITS),
    "figures": partial(figures, LIMITS),
    "overlap": partial(overlap, LIMITS),
    "persistent": partial(persistent, LIMITS),
    "peers": peers,
}
_TIMED: Final = ("-times", "figures", "overlap", "persistent")
"""Ends of the names of parts that need `LIMITS`."""


def printed(name: str) -> bool:
    """Run a part and print its lines, the last of which ends it; return whether none of them says `failed`."""
    begun, failures = time.monotonic(), []
    for line in kept({}, PARTS[name]):
        print(json.dumps(line), flush=True)
        failures += [str(line["failed"])] if "failed" in line else []
    failed = {"failed": f"{len(failures)} of its lines, the first: {failures[0]}"} if failures else {}
    print(json.dumps({"part": name, "s": round(time.monotonic() - begun, 1), **failed}), flush=True)
    return not failures


def main() -> int:
    """Run parts up to the first that fails, after which a GPU may be of no use to this process; return 1 there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    chosen = parser.parse_args().parts
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no GPU; run this on a machine with a GPU of NVIDIA")
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**about, "parts": chosen}), flush=True)
    if any(name.endswith(_TIMED) for name in chosen):
        LIMITS.update(ceilings())
        print(json.dumps(LIMITS), flush=True)
    return int(not all(printed(name) for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
