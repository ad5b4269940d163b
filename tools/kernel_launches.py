"""What engines on the device cuda launch: models run on tensors without memory, and a launcher writes down the calls.

So an engine of the same sizes finds a binary for each of its launches, whatever its batches are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import CacheGroup, KeysAndValues, Latent, State
from octavo.core.sampling_params import SamplingParams
from octavo.devices.cuda.attention import CODES, CudaBackend, RotatingCudaBackend
from octavo.devices.cuda.cubins import Call, call_of
from octavo.devices.cuda.ops.coded import PackedFormat
from octavo.devices.cuda.ops.linear import multiplied
from octavo.devices.cuda.runtime import CudaRuntime, triton_function
from octavo.devices.cuda.sampler import CudaSampler
from octavo.distributed.mesh import Mesh
from octavo.models.loader import DTYPES, LoadedModel
from octavo.ops.coded import CodeSpec
from octavo.ops.experts import Routing
from octavo.ops.prepare_linear import LinearShape
from octavo.ops.prepare_quantized import INT4, INT4_G128, INT8
from octavo.quantization.floats import MXFP4, NVFP4
from octavo.quantization.gguf import BLOCK_TYPES
from octavo.quantization.method import UNQUANTIZED, Coded, WeightMethod
from octavo.sampling.filters import default_filters
from octavo.sampling.metadata import SamplingRow
from octavo.sampling.processors import ProcessedRow, default_processors
from tools.kernel_models import MODELS

STEPS: Final = (
    *(((1,), (4096,)), ((1, 1, 1), (16, 16, 16))),
    *(((1,), (16,)), ((1,), (512,)), ((1,), (65_536,)), ((1,) * 264, (16,) * 264)),
    *(((each,), (each,)) for each in (16, 32, 64, 96, 256, 1024, 8192)),
)
"""Queries and lengths of rows: divided among programs, not divided, both with few programs and with many, and prompts
of every tile of a product."""
_MOST_DRAWN: Final = 256
"""Rows that draw in a step."""
COMMON_HEADS: Final = (64, 128)
"""Caches of 8 bits, and types of weights behind the first, are those of models with heads of such a size."""
ADAPTED_SPECS: Final = (
    INT8,
    *(
        replace(each, activation_bits=16)
        for each in (
            *(INT4, INT4_G128, CodeSpec(4, 128, "none", torch.bfloat16), CodeSpec(4, 128, "zeros", torch.bfloat16)),
            *(CodeSpec(4, 128, "none", torch.float16), CodeSpec(4, 128, "zeros", torch.float16)),
        )
    ),
)
"""Of codes in every type, with adapters: those of `--quantization`, GPTQ and AWQ, times activations of their bits."""
SPECS: Final = (NVFP4, *(each.spec for each in BLOCK_TYPES.values() if each.spec is not None))
"""Of codes in the first type: those of NVFP4 and MXFP4, and of GGUF."""
STACKED_SPECS: Final = (*ADAPTED_SPECS[:5], replace(MXFP4, activation_bits=16), NVFP4)
"""Of codes of experts in the first type."""
FLOAT8_GROUPS: Final = (128, 0)
"""Inputs of FP8 that share a scale, of blocks and of outputs."""

PARAMS: Final = (
    SamplingParams(seed=1, logprobs=2),
    SamplingParams(seed=1, top_p=0.9, repetition_penalty=1.1, bad_words=("ab",)),
)
"""Of rows that need every kernel of the sampler."""


@dataclass(eq=False)
class _Sequence:
    """What is read of a sequence that is drawn from."""

    params: SamplingParams
    index: int = 0
    line: int = 0
    num_prompt_tokens: int = 1
    end_token_ids: Sequence[int] = (0,)
    bad_words_token_ids: Sequence[Sequence[int]] = ((1, 2),)

    def stored_tokens(self) -> Tensor:
        return _empty(3, 64, dtype=torch.int32)


class _Masks:
    """A `MaskingProcessor` that bars every token."""

    name = "masks"

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.zeros(-(-vocab_size // 32), dtype=np.uint32)

    def needs(self, params: SamplingParams) -> bool:
        return True

    def update(self, rows: Sequence[ProcessedRow]) -> None:
        """Rows are alike."""

    def apply(self, logits: Tensor) -> None:
        raise NotImplementedError("its masks are applied")

    def mask(self, row: SamplingRow) -> NDArray[np.uint32]:
        return self._mask


class Recorder:
    """A `Launcher` that launches nothing. calls: each of them once, in their order."""

    def __init__(self) -> None:
        self._found: dict[Call, None] = {}

    def __call__(self, kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        self._note(kernel, arguments, constants)
        if kernel.startswith("linear.") and constants.get("HAS_ADDEND") is False:
            # what adapters add to the product
            place = triton_function(kernel).arg_names.index("add")
            before, (out, *others) = arguments[:place], arguments[place + 1 :]
            if out.dtype is not torch.float32:
                added = *before, _empty(1, dtype=torch.float32), out, *others
                self._note(kernel, added, {**constants, "HAS_ADDEND": True})

    def _note(self, kernel: str, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self._found[call_of(kernel, arguments, constants, unspecialized(kernel))] = None

    @property
    def calls(self) -> list[Call]:
        return list(self._found)


def unspecialized(kernel: str) -> frozenset[int]:
    """Return the places of a kernel's arguments whose values make no other code."""
    return frozenset(each.num for each in triton_function(kernel).params if each.do_not_specialize)


def launches(
    models: Iterable[Mapping[str, Any]] = MODELS.values(),
    dtypes: Sequence[str] = ("bfloat16", "float16"),
    *,
    has_codes: bool = True,
    shared_bytes: int = 228 << 10,
    has_float8: bool = True,
) -> list[Call]:
    """Return the launches of engines of models, given by their `config.json`, once each.

    dtypes: of plain weights and activations. has_codes: whether weights may be codes too. shared_bytes: shared memory
    of an SM. has_float8: whether GPUs decode floats of 8 bits.
    """
    recorder, configs, (first, *others) = Recorder(), list(models), (DTYPES[each] for each in dtypes)
    common = [each for each in configs if each.get("head_dim") in COMMON_HEADS]
    for runtime in (CudaRuntime(is_invariant, recorder, shared_bytes) for is_invariant in (False, True)):
        with torch.inference_mode():
            for config in configs:
                _run(runtime, config, first, first)
            for config, cache_dtype in product(common, CODES):
                _run(runtime, config, first, cache_dtype)
            for config, dtype in product(common, others):
                _run(runtime, config, dtype, dtype)
            for dtype in (first, *others):
                _multiply(runtime, dtype)
            for vocab_size in {each["vocab_size"]: None for each in configs}:
                _sample(runtime, vocab_size)
    if has_codes:
        runtime = CudaRuntime(launch=recorder, has_float8=has_float8)
        for config, group in product(common, FLOAT8_GROUPS):
            _run(runtime, config, first, first, Coded(CodeSpec(8, group, "none", torch.float32, is_float=True)))
        for spec, dtype in product(ADAPTED_SPECS, (first, *others)):
            _multiply_codes(runtime, spec, dtype, has_adapters=True)
            other = replace(spec, activation_bits=24 - spec.activation_bits)
            _multiply_codes(runtime, other, dtype, has_adapters=False)
        for spec in SPECS:
            _multiply_codes(runtime, spec, first, has_adapters=False)
        for spec in STACKED_SPECS:
            _multiply_codes_of_experts(runtime, spec, first)
    return recorder.calls


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _run(
    runtime: CudaRuntime,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    method: WeightMethod = UNQUANTIZED,
) -> None:
    """Run every kind of step of a model."""
    backend = RotatingCudaBackend(runtime, cache_dtype)
    opened = LoadedModel.open(Checkpoint(Path("model"), config), Mesh.single(), dtype, method)
    groups = opened.shape.cache_groups
    caches = [cache for _, cache in sorted(_caches(backend, groups), key=lambda pair: pair[0])]
    with opened.bound_dry(runtime.bind(), backend) as model:
        for queries, lengths in STEPS:
            tables = [range(-(-length // 16)) for length in lengths]
            metadata = AttentionMetadata.build(queries, lengths, tables, 16)
            ids = _empty(sum(queries), dtype=torch.int64)
            hidden = model(ModelInput(ids, ids, (metadata,) * len(groups), caches))
            model.compute_logits(hidden[:_MOST_DRAWN])


def _caches(backend: CudaBackend, groups: Iterable[CacheGroup]) -> Iterator[tuple[int, Tensor]]:
    """Yield the cache of each layer, of 8 blocks."""
    for group in groups:
        keeps = group.keeps
        if isinstance(keeps, State):
            yield from ((layer, _empty(1, 8, keeps.num_values, dtype=torch.float32)) for layer in group.layers)
            continue
        assert isinstance(keeps, KeysAndValues | Latent), f"no launches are known of {keeps}"
        sizes = (
            (keeps.kv_heads, keeps.head_dim) if isinstance(keeps, KeysAndValues) else (1, keeps.size, keeps.value_size)
        )
        for layer in group.layers:
            yield layer, _empty(*backend.cache_shape(8, 16, *sizes), dtype=backend.element_type)


def _multiply(runtime: CudaRuntime, dtype: torch.dtype) -> None:
    """Multiply as adapters do by their own factors, of whole and of other tiles."""
    wide = _empty(64, 64, dtype=torch.float32)
    for inputs, width, tokens in product((64, 256), (64, 128), (3, 32, 64, 96, 16_384)):
        weight = {"weight": _empty(width, inputs, dtype=dtype)}
        multiplied(runtime, _empty(tokens, inputs, dtype=dtype), weight, torch.float32)
        multiplied(runtime, _empty(tokens, 64, dtype=torch.float32), {"weight": wide}, torch.float32)


def _multiply_codes(runtime: CudaRuntime, spec: CodeSpec, dtype: torch.dtype, *, has_adapters: bool) -> None:
    """Multiply few and many rows by plain and gated weights."""
    form, inputs = PackedFormat(runtime, spec), 16 * max(spec.group, spec.super_group, 64)
    for has_bias, gated, tokens in product((False, True), (False, True), (3, 12, 24, 48, 96)):
        shape = LinearShape(64, inputs, dtype, has_bias, gated)
        state = {name: _empty(*each.shape, dtype=each.dtype) for name, each in form.state_specs(shape).items()}
        linear, x = form.restore(shape, state), _empty(tokens, inputs, dtype=dtype)
        linear(x)
        if has_adapters:
            linear(x, _empty(tokens, 64, dtype=torch.float32))
        if not gated and not has_bias:
            linear.in_float32(x)


def _multiply_codes_of_experts(runtime: CudaRuntime, spec: CodeSpec, dtype: torch.dtype, experts: int = 128) -> None:
    """Multiply few and many rows of up to so many experts, as both of their weights do; those of MXFP4 have biases."""
    form, inputs = PackedFormat(runtime, spec), 16 * max(spec.group, 64)
    biases = (False, True) if spec.layout == MXFP4.layout else (False,)
    for has_bias, gated, tokens in product(biases, (False, True), (3, 192, 768, 4096)):
        shape = LinearShape(64, inputs, dtype, has_bias, gated and not has_bias)
        specs = form.state_specs(shape)
        state = {name: _empty(experts, *each.shape, dtype=each.dtype) for name, each in specs.items()}
        pairs, starts = (_empty(each, dtype=torch.int32) for each in (8 * tokens, experts + 1))
        routing = Routing(_empty(tokens, 8, dtype=torch.float32), pairs, pairs, starts)
        stack, rows = form.restore_stack(shape, state), tokens if gated else 8 * tokens
        stack(_empty(rows, inputs, dtype=dtype), routing, of_tokens=gated, in_float32=not gated)


def _sample(runtime: CudaRuntime, vocab_size: int) -> None:
    """Draw with every kernel."""
    meta = torch.device("meta")
    processors = *default_processors(), _Masks(vocab_size)
    sampler = CudaSampler(runtime, meta, lambda values: list, processors, default_filters())
    logits = _empty(3, vocab_size, dtype=torch.float32)
    for params in PARAMS:
        row = SamplingRow(cast(Any, _Sequence(params)), 8)
        sampler.launch(logits, [row] * 3)
