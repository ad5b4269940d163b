"""A decode step whose layers are one launch, beside the launches of the engine, on a GPU.

`python -m benchmarks.gpu.run_all --parts persistent` compares both and times them as CUDA graphs of 20 steps, in turns.

Engines do not use `persistent_kernel`: whether they should, this measures. A layer of the 0.6B takes nine launches of
1 to 1.5 µs beside their work, in which memory is idle. Here a program on each multiprocessor computes all layers, and
requests the first tiles of the next phase's weights before it waits for the others. Nothing of it has run on a GPU.

What is expected of one row with 224 keys on an H200, from the bytes of a phase at 4.15 TB/s, 1 µs of a barrier that
passes while they are requested, and 0.9 µs of reading inputs, sums over warps and writes behind it:

| phase of a layer | 0.6B: MB, µs | 8B: MB, µs |
|---|---|---|
| norm, queries, keys and values | 8.4, 2.9 | 50, 13.0 |
| norms of heads, rotation, cache, attention | 0.9, 3.0 | 0.9, 3.0 |
| output and residual | 4.2, 1.9 | 34, 9.0 |
| norm, gate and up, SiLU | 12.6, 3.9 | 201, 49.4 |
| down and residual | 6.3, 2.4 | 101, 25.2 |
| all layers and the head | 0.48 ms, 60 % of the bandwidth | 3.9 ms, 91 % |
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor

from benchmarks.gpu import persistent_kernel
from benchmarks.gpu.figures import sizes
from benchmarks.gpu.kept import kept
from benchmarks.gpu.small import microseconds
from benchmarks.models import CONFIGS
from octavo.attention.backend import AttentionBackend
from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.devices.cuda.attention import RotatingCudaBackend
from octavo.devices.cuda.runtime import OPTIONS, CudaRuntime, compute_type, power_of_2
from octavo.distributed.mesh import Mesh
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.llama import Qwen3ForCausalLM
from octavo.models.loader import LoadedModel
from octavo.ops.registry import Ops

MODELS: Final = ("qwen3-0.6b", "qwen3-8b")
ROWS: Final = (1, 4, 16)
LENGTHS: Final = (224, 4096)
MOST_ROWS: Final = 16
CHUNK: Final = 64
"""Keys of an item of attention."""
WARPS: Final = 8
"""A program has all registers of a multiprocessor: 255 of each thread."""
ALLOWED: Final = 0.02
"""Of the norm of what is compared, times √(n + 1) behind n layers: both ways round to bfloat16, in different places. A
CPU in bfloat16 is 0.0025 from one in float32 in the 0.6B's first keys and values, and 0.0075·√n in those behind n."""
WEIGHTS: Final = (
    *("input_layernorm", "self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj"),
)
"""In the order of the kernel's pointers."""
_BLOCK, _TURNS = 16, 3


def outputs_of_tile(outputs: int, rows: int, programs: int) -> int:
    """Return how many outputs a tile has, so that the busiest program reads the least: weights and rows of x."""

    def read(width: int) -> int:
        return -(-outputs // (width * programs)) * (width + rows)

    return min((16, 8), key=read)


def config_of(name: str) -> DecoderConfig:
    """Return the config of one of `MODELS`."""
    return Qwen3ForCausalLM.read(Checkpoint(Path(name), CONFIGS[name]))


def constants_of(c: DecoderConfig, rows: int, programs: int) -> dict[str, Any]:
    """Return the kernel's constants that follow from a model, its rows and the programs."""
    widths = c.heads.q_size + 2 * c.heads.kv_size, 2 * c.intermediate_size, c.hidden_size
    tiles = (outputs_of_tile(width, rows, programs) for width in widths)
    return {
        **dict(zip(("QKV_N", "GATED_N", "DOWN_N"), tiles, strict=True)),
        "OUT_N": 8,  # these tiles are in registers while the program attends
        **dict(zip(("HEADS", "KV_HEADS", "DIM"), (c.heads.query, c.heads.kv, c.heads.dim), strict=True)),
        **dict(zip(("HIDDEN", "INNER", "CHUNK"), (c.hidden_size, c.intermediate_size, CHUNK), strict=True)),
        **dict(zip(("R", "S"), (8 if rows <= 8 else 16, WARPS), strict=True)),
        "BK": min(1024, power_of_2(c.hidden_size, 32 * WARPS)),
    }


class PersistentStep:
    """Decode steps of a Qwen3 and its caches, of up to 16 rows, with all layers in one launch.

    programs: no more than multiprocessors, which hold one each. Raises ValueError for a model of another shape.
    """

    def __init__(self, model: DecoderStack, caches: Sequence[Tensor], programs: int) -> None:
        state, self._model, self._programs = model.state(), model, programs
        names = [[f"layers.{layer}.{name}.weight" for name in WEIGHTS] for layer in model.layers]
        others = {name for name in state if name.startswith("layers.")} ^ {each for of in names for each in of}
        if others:
            raise ValueError(f"not a dense decoder in the shape of Qwen3: {min(others)}")
        found = [[*(state[name] for name in of_layer), *cache] for of_layer, cache in zip(names, caches, strict=True)]
        pointers = [[each.data_ptr() for each in of_layer] for of_layer in found]
        self._layers = torch.tensor(pointers, device=caches[0].device)
        self._layers.points_to = [each for of_layer in found for each in of_layer]
        self._strides = caches[0].stride()[1:4]
        self.counters = torch.zeros(2 + MOST_ROWS * caches[0].shape[2], dtype=torch.int32, device=caches[0].device)

    def __call__(self, batch: ModelInput, *, has_barriers: bool = True) -> Tensor:
        """Return the normalised last hidden states [rows, hidden]; without barriers each phase is a launch."""
        hidden = self._model.begin(batch)[0].contiguous()
        launch, num_layers = self._launcher(batch, hidden), len(self._layers)
        if has_barriers:
            launch(0, num_layers, persistent_kernel.ALL.value)
        else:
            for layer in range(num_layers):
                for phase in range(5):
                    launch(layer, layer + 1, phase)
        return self._model.normalize(hidden, None)

    def _launcher(self, batch: ModelInput, hidden: Tensor) -> Callable[[int, int, int], None]:
        """Return what launches a phase, or all, of layers [first, last). It changes hidden [rows, hidden]."""
        c, [metadata, *_], (rows, _) = self._model.config, batch.attention, hidden.shape
        heads, kv_heads, dim = c.heads.query, c.heads.kv, c.heads.dim
        layer: Any = next(iter(self._model.layers.values()))
        angles = layer.self_attn.rope.rotation(batch).k_table
        chunks = -(-max(metadata.lengths) // CHUNK)
        widths = c.hidden_size, (heads + 2 * kv_heads) * dim, heads * dim, c.intermediate_size
        middle, qkv, attended, inner = (hidden.new_empty(rows, width) for width in widths)
        parts, peaks = (
            hidden.new_empty(rows * kv_heads * chunks * 16 * width, dtype=torch.float32) for width in (dim, 2)
        )
        kernel = persistent_kernel.decode[(self._programs,)]
        tensors = self._layers, hidden, middle, qkv, attended, inner, parts, peaks, self.counters, batch.positions
        of_rows = metadata.slot_mapping, metadata.sequence_lengths, metadata.block_tables, angles
        numbers = metadata.block_tables.stride(0), *self._strides, c.norm_eps, dim**-0.5
        constants = constants_of(c, rows, self._programs) | {"BLOCK": metadata.block_size}
        constants |= {"TYPE": getattr(tl, compute_type(hidden)), "num_warps": WARPS, "launch_cooperative_grid": True}
        return lambda first, last, phase: kernel(
            *tensors, *of_rows, rows, chunks, first, last, *numbers, PHASE=phase, **OPTIONS | constants
        )


def open_model(
    config: Mapping[str, Any], dtype: torch.dtype, device: str, ops: Ops, backend: AttentionBackend
) -> DecoderStack:
    """Return a model with random weights, those of norms too."""
    opened = LoadedModel.open(Checkpoint(Path("model"), config), Mesh.single(), dtype)
    model = opened.load(ops, backend, device=device, dummy_seed=0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    return model


def batch_of(model: DecoderStack, lengths: Sequence[int], dtype: torch.dtype, device: str) -> ModelInput:
    """Return a decode step of sequences of these lengths, whose blocks lie in random places, with caches of its own."""
    heads, counts = model.config.heads, [-(-length // _BLOCK) for length in lengths]
    blocks = iter(torch.randperm(sum(counts)).add(1).tolist())
    tables = [[next(blocks) for _ in range(count)] for count in counts]
    made = AttentionMetadata.build([1] * len(lengths), lengths, tables, _BLOCK)
    names = "query_starts", "sequence_lengths", "block_tables", "slot_mapping"
    metadata = replace(made, **{name: getattr(made, name).to(device) for name in names})
    shape = 2, sum(counts) + 1, heads.kv, _BLOCK, heads.dim
    caches = [torch.randn(shape, dtype=dtype, device=device) for _ in model.layers]
    positions = torch.tensor(lengths, device=device) - 1
    return ModelInput(positions % model.config.vocab_size, positions, (metadata,), caches)


def compared(model: DecoderStack, batch: ModelInput, programs: int) -> dict[str, Any]:
    """Return how far the kernel is from the launches of the engine, in the new keys and values of any layer and in
    hidden states (see `ALLOWED`), and whether it has the same bits again and with each phase as a launch."""
    slots = batch.attention[0].slot_mapping
    own = replace(batch, kv_caches=[cache.clone() for cache in batch.kv_caches])
    step = PersistentStep(model, own.kv_caches, programs)

    def results(run: Callable[[ModelInput], Tensor], on: ModelInput) -> list[Tensor]:
        hidden = run(on).clone()
        found = [*(cache[:, slots // _BLOCK, :, slots % _BLOCK] for cache in on.kv_caches), hidden]
        for cache in on.kv_caches:
            cache[:, slots // _BLOCK, :, slots % _BLOCK] = 0.0
        return found

    expected, found, again = (results(run, on) for run, on in ((model, batch), (step, own), (step, own)))
    apart = results(partial(step, has_barriers=False), own)
    pairs = [(one.float(), other.float()) for one, other in zip(expected, found, strict=True)]
    norms = [float((one - other).norm() / one.norm()) for one, other in pairs]
    difference = max(each / (behind + 1) ** 0.5 for behind, each in enumerate(norms))
    return {
        "difference": difference,
        "is_allowed": difference <= ALLOWED,
        "again_equal": all(map(torch.equal, found, again)),
        "apart_equal": all(map(torch.equal, found, apart)),
    }


def logits_of(model: DecoderStack, run: Callable[[ModelInput], Tensor], batch: ModelInput) -> Tensor:
    """Return the logits of hidden states that `run` makes."""
    return model.compute_logits(run(batch))


def persistent(limits: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the lines of all models."""
    for name in MODELS:
        yield from kept({"persistent": name}, partial(steps, limits, name))


@torch.inference_mode()
def steps(limits: Mapping[str, float], name: str) -> Iterator[dict[str, Any]]:
    """Yield what `compared` returns, and times of whole steps without draws, with the floor's share of them."""
    programs, dtype = torch.cuda.get_device_properties(0).multi_processor_count, torch.bfloat16
    runtime, (read, _, kv_bytes) = CudaRuntime(), sizes(CONFIGS[name])
    model = open_model(CONFIGS[name], dtype, "cuda", runtime.bind(), RotatingCudaBackend(runtime, dtype))
    for num_rows, length in product(ROWS, LENGTHS):
        batch = batch_of(model, [length] * num_rows, dtype, "cuda")
        shape = {"rows": num_rows, "length": length}
        yield {**shape, **compared(model, batch, programs)}
        runs = {"launches": model, "persistent": PersistentStep(model, batch.kv_caches, programs)}
        calls = {way: partial(logits_of, model, run, batch) for way, run in runs.items()}
        turns = [{way: microseconds(call) / 1e3 for way, call in calls.items()} for _ in range(_TURNS)]
        taken = {way: statistics.median(turn[way] for turn in turns) for way in runs}
        floor_ms = (2 * read + kv_bytes * num_rows * length) / limits["bytes_per_s"] * 1e3
        shares = {f"{way}_of_floor": floor_ms / each for way, each in taken.items()}
        yield {**shape, **{f"{way}_ms": each for way, each in taken.items()}, "floor_ms": floor_ms, **shares}
