"""Kernels of the device cuda, interpreted: right by the reference, and the same bits in any cut and mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.attention.backend import Scores
from octavo.attention.cache_format import quantize
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.attention import CudaBackend, Division
from octavo.devices.cuda.ops.coded import pack, padded_inputs, tile_of, unpack
from octavo.devices.cuda.ops.linear import FEW
from octavo.devices.cuda.runtime import OPTIONS, CudaRuntime, launch_by_triton
from octavo.ops.coded import CodeSpec, example_specs, example_weight
from octavo.ops.lora import Factors, LoRAShape, Run
from octavo.ops.prepare_quantized import INT4, INT8
from octavo.ops.registry import bind, operators
from octavo.quantization.floats import MXFP4
from tests.conformance.agreement import check_agreement
from tests.conformance.paged import Heads, Sequences
from tests.conformance.test_attention import TOLERANCE, one_by_one, side_by_side

RUNTIME = CudaRuntime(is_invariant=True)
OPS = RUNTIME.bind()
COMPILED = [choice.operator for choice in OPS.choices if choice.implementation == "triton"]
WHOLE, DIVIDED = Division(32, 16, programs=0), Division(32, 16, programs=1 << 30)
"""Keys of a sequence in one program, and each chunk of them in one of its own where single tokens are computed."""

SHAPES = {
    "dim 8": Heads(dim=8, scale=0.4),
    "dim 24, slopes": Heads(dim=24, alibi=True),
    "dim 128, cap": Heads(heads=4, kv_heads=2, dim=128, soft_cap=3.0),
    "latents of 24 and 8": Heads(heads=3, kv_heads=1, dim=32, value_size=24),
    "everything, blocks of 32": Heads(
        heads=6, kv_heads=3, dim=72, window=20, soft_cap=2.0, alibi=True, block_size=32, has_sinks=True
    ),
    "dim 80, three share": pytest.param(Heads(heads=6, kv_heads=2, dim=80), marks=pytest.mark.long),
    "dim 96, window": pytest.param(Heads(dim=96, window=37), marks=pytest.mark.long),
    "dim 256, all share": pytest.param(Heads(heads=5, kv_heads=1, dim=256, scale=0.06), marks=pytest.mark.long),
    "dim 64, sinks": pytest.param(Heads(heads=8, kv_heads=1, has_sinks=True, window=30), marks=pytest.mark.long),
    "both ways": Heads(heads=2, kv_heads=1, dim=16, ahead=(1 << 31) - 1),
}
LENGTHS = [1, 17, 40]


def test_triton_has_the_operators_of_a_plain_decoder() -> None:
    expected = {
        "add_rms_norm",
        "bounded_delta_rule",
        "clamped_swiglu",
        "gated_by_sigmoid",
        "gated_by_softplus",
        "gated_delta_rule",
        "gated_rms_norm",
        "gelu_tanh_and_mul",
        "mamba2_scan",
        "normed_streams",
        "prepare_coded",
        "prepare_linear",
        "prepare_quantized",
        "rms_norm",
        "rotary",
        "selective_scan",
        "short_convolution",
        "silu_and_mul",
        "silu_times",
        "slot_linear",
        "soft_capped",
    }
    assert expected <= set(COMPILED)
    plain = {choice.operator: choice.implementation for choice in CudaRuntime().bind().choices}
    assert plain["prepare_linear"] == "cublas"


def trials() -> list[Any]:
    """Return operators with types. Where tests are to be short, those of codes, which have many examples, in float32
    alone; what has tests of its own below or in `test_recurrent` in none."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    widest_long = {"prepare_coded": 2}
    recurrences = ("gated_delta_rule", "mamba2_scan", "selective_scan", "short_convolution")
    widest_long |= dict.fromkeys((*recurrences, "prepare_quantized"), 4)
    return [
        pytest.param(name, each, marks=pytest.mark.long if each.itemsize <= widest_long.get(name, 0) else ())
        for name in COMPILED
        for each in types
    ]


@pytest.mark.parametrize(("name", "dtype"), trials(), ids=str)
def test_a_kernel_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    check_agreement(OPS, name, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gated_product_of_cublas_is_activated_by_one_launch(dtype: torch.dtype) -> None:
    launched: list[str] = []

    def launch(kernel: str, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel)
        launch_by_triton(kernel, *arguments, **constants)

    check_agreement(CudaRuntime(launch=launch).bind(), "prepare_linear", dtype)
    many = [each for each in operators()["prepare_linear"].examples(dtype) if len(each[0]) > FEW]
    assert many
    if dtype is torch.float32:
        many = list(operators()["prepare_linear"].examples(dtype))
    activated = [name for name in launched if name != "linear.linear"]
    assert activated == ["elementwise.elementwise"] * sum(each[4] for each in many)


def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 96, generator=generator) for size in (40, 70))
    linear = OPS.prepare_linear(weight)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention_is_that_of_float64_with_one_result_for_any_cut(shape: Heads, dtype: torch.dtype) -> None:
    sequences = Sequences.make(shape, LENGTHS, dtype)
    whole = sequences.compute(CudaBackend(RUNTIME, dtype, WHOLE), sequences.whole())
    for one, other in zip(whole, sequences.expected(dtype), strict=True):
        assert one.dtype is dtype
        assert (one.double() - other).abs().max() <= TOLERANCE[dtype]
    if shape.ahead:
        return  # what lies ahead has to be in the step
    cut = sequences.compute(CudaBackend(RUNTIME, dtype, DIVIDED), one_by_one(sequences, [1, 7, 33]))
    beside = sequences.compute(CudaBackend(RUNTIME, dtype, DIVIDED), side_by_side(sequences, [38, 1]), forgets=True)
    for one, other, third in zip(whole, cut, beside, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("is_invariant", [True, False])
def test_long_sequences_of_guesses_are_divided_where_that_changes_no_bit(is_invariant: bool) -> None:
    launched: list[str] = []

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append(kernel)
        launch_by_triton(kernel, grid, *arguments, **constants)

    runtime = CudaRuntime(is_invariant=is_invariant, launch=launch)
    sequences = Sequences.make(Heads(heads=4, kv_heads=2, dim=16), [40, 44], torch.float32)
    steps = side_by_side(sequences, [36, 4])
    found = sequences.compute(CudaBackend(runtime, torch.float32, DIVIDED), steps)
    assert ("attention.merge" in launched) == is_invariant
    whole = sequences.compute(CudaBackend(runtime, torch.float32, WHOLE), steps)
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


@pytest.mark.parametrize("window", [None, 270])
def test_any_number_of_chunks_is_put_together_as_one_program_adds_them(window: int | None) -> None:
    lengths = [300, 256, 257]  # in chunks of 32, of which 8 are read at once
    sequences = Sequences.make(Heads(heads=2, kv_heads=1, dim=16, window=window), lengths, torch.float32)
    steps = side_by_side(sequences, [255, 1])
    whole, divided = (sequences.compute(CudaBackend(RUNTIME, torch.float32, each), steps) for each in (WHOLE, DIVIDED))
    assert all(torch.equal(one, other) for one, other in zip(whole, divided, strict=True))


CODED = {
    "int8, cap": (torch.int8, Heads(heads=6, kv_heads=2, dim=40, soft_cap=3.0)),
    "fp8, window, blocks of 32": (torch.float8_e4m3fn, Heads(dim=24, window=20, block_size=32, has_sinks=True)),
    "fp8, latents": (torch.float8_e4m3fn, Heads(heads=3, kv_heads=1, dim=32, value_size=24)),
}


@pytest.mark.parametrize(("cache_dtype", "shape"), CODED.values(), ids=CODED.keys())
def test_caches_of_codes_are_read_as_kept_with_one_result_for_any_cut(cache_dtype: torch.dtype, shape: Heads) -> None:
    dtype = torch.bfloat16 if shape.soft_cap else torch.float32
    sequences = Sequences.make(shape, LENGTHS, dtype)
    whole = sequences.compute(CudaBackend(RUNTIME, cache_dtype, WHOLE), sequences.whole())
    for one, other in zip(whole, sequences.expected(cache_dtype), strict=True):
        assert (one.double() - other).abs().max() <= TOLERANCE[dtype]
    cut = sequences.compute(CudaBackend(RUNTIME, cache_dtype, DIVIDED), one_by_one(sequences, [1, 7, 33]))
    beside = sequences.compute(
        CudaBackend(RUNTIME, cache_dtype, DIVIDED), side_by_side(sequences, [38, 1]), forgets=True
    )
    for one, other, third in zip(whole, cut, beside, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_of_a_cache_are_those_of_the_reference(cache_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp(torch.randn(40, 1, 72, generator=generator) * 3)
    new = torch.randn(40, 1, 72, generator=generator) * spread
    new[3], new[4, 0, 5], new[6, 0, 7] = 0.0, float("inf"), float("nan")
    backend = CudaBackend(RUNTIME, cache_dtype)
    cache = torch.zeros(backend.cache_shape(4, 16, 1, 72), dtype=torch.uint8)
    backend.run(new[:0], new, new, cache, AttentionMetadata.of_slots(torch.arange(16, 56), 16), Scores(1.0))
    blocks = cache[0, 1:].reshape(3, -1)
    codes = blocks[:, : 16 * 72].reshape(48, 72)[:40]
    scales = blocks[:, 16 * 72 :].contiguous().view(torch.float32).reshape(48, 1)[:40]
    expected, expected_scales = quantize(new[:, 0], cache_dtype)
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    finite = ~scales.isnan()[:, 0]
    assert finite.sum() == 38
    assert torch.equal(scales[finite], expected_scales[finite])
    assert torch.equal(codes[finite], expected.view(torch.uint8)[finite])


@pytest.mark.parametrize("shape", [Heads(heads=2, kv_heads=1, dim=16), Heads(dim=24, window=20, has_sinks=True)])
def test_prompts_have_no_chunks_where_bits_may_differ_from_those_of_single_tokens(shape: Heads) -> None:
    sequences, backend = Sequences.make(shape, [150], torch.float32), CudaBackend(CudaRuntime(), torch.float32)
    [found] = sequences.compute(backend, sequences.whole())
    assert (found.double() - sequences.expected(torch.float32)[0]).abs().max() <= TOLERANCE[torch.float32]
    [cut] = sequences.compute(backend, one_by_one(sequences, [70, 135]))
    assert torch.equal(found, cut)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("spec", [INT4, INT8, MXFP4], ids=lambda each: each.layout)
def test_products_with_codes_have_the_bits_of_the_reference_for_any_rows(spec: CodeSpec, bits: Literal[8, 16]) -> None:
    spec, generator = replace(spec, activation_bits=bits), torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 300, generator=generator), example_weight(spec, 40, 300, generator)
    linear, reference = (each.prepare_coded(spec)(weight, x.dtype) for each in (OPS, bind()))
    together = linear(x)
    assert torch.equal(together, reference(x))
    assert len({tile_of(spec, tokens)["BM"] for tokens in (1, 12, 70)}) == 3
    for rows in (slice(3, 4), slice(12), slice(9, 42)):
        assert torch.equal(linear(x[rows]), together[rows])
    assert linear.nbytes < 40 * 300 * spec.bits / 8 * 2


@pytest.mark.parametrize("spec", list(example_specs()), ids=lambda each: each.layout)
def test_codes_of_a_weight_come_back_from_what_is_packed(spec: CodeSpec) -> None:
    codes = example_weight(spec, 3, 80, torch.Generator().manual_seed(0))["codes"]
    packed = pack(spec, codes)
    assert torch.equal(unpack(spec, packed, 80), codes)
    assert packed.nbytes == 3 * padded_inputs(spec, 80) * spec.bits // 8


@pytest.mark.parametrize("ranks", [(8, 70, 5), (300, 8, 250)], ids=str)
def test_what_an_adapter_adds_does_not_depend_on_its_slot_and_the_others(ranks: tuple[int, ...]) -> None:
    shape = LoRAShape(70, 40, (Run(0, 30, 0), Run(30, 10, 1)), 3, torch.float32)
    adapters = [[Factors(torch.randn(rank, 70), torch.randn(40, rank), 0.5)] * 2 for rank in ranks]
    x = torch.randn(9, 70)
    found = []
    for order in ((0, 1, 2), (2, 0, 1), (0,)):
        layer = OPS.slot_linear(shape)
        for slot, number in enumerate(order, 1):
            layer.set(slot, layer.pack(adapters[number]))
        slots = torch.tensor([0, *[1 + order.index(0)] * 8], dtype=torch.int32)
        found.append(layer(x, slots, torch.empty(0)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not found[0][0].any()


@pytest.mark.parametrize(
    ("num_rows", "length", "shared_bytes", "stages"),
    [
        *((54, 16, 228 << 10, 5), (55, 16, 228 << 10, 3), (1, 54 * 256, 228 << 10, 5), (1, 54 * 256 + 1, 228 << 10, 3)),
        (1, 16, 100 << 10, 3),
    ],
)
def test_few_programs_of_single_tokens_read_further_ahead(
    num_rows: int, length: int, shared_bytes: int, stages: int
) -> None:
    launched: list[tuple[str, int]] = []

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append((kernel, (OPTIONS | constants)["num_stages"]))

    backend = CudaBackend(CudaRuntime(launch=launch, shared_bytes=shared_bytes), torch.float32)
    cache = torch.zeros(1).expand(backend.cache_shape(2, 16, 2, 16))
    metadata = AttentionMetadata.build([1] * num_rows, [length] * num_rows, [[1] * -(-length // 16)] * num_rows, 16)
    q = torch.zeros(num_rows, 4, 16)
    backend.run(q, q[:0, :2], q[:0, :2], cache, metadata, Scores(0.25))
    assert launched[0] == ("attention.attend", stages)


@pytest.mark.parametrize("is_invariant", [True, False])
def test_single_tokens_beside_a_prompt_are_divided_as_they_are_alone(is_invariant: bool) -> None:
    launched: list[Any] = []

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append((kernel, constants.get("M"), constants.get("SPLIT"), grid[0]))
        launch_by_triton(kernel, grid, *arguments, **constants)

    generator = torch.Generator().manual_seed(0)
    backend = CudaBackend(CudaRuntime(is_invariant, launch), torch.float32, Division(chunk=32, tile=16))
    cache = torch.randn(backend.cache_shape(12, 16, 2, 16), generator=generator)
    queries, lengths, tables = [1, 20, 1], [70, 30, 45], [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    q = torch.randn(22, 4, 16, generator=generator)

    def attended(q: torch.Tensor, *rows: int) -> torch.Tensor:
        metadata = AttentionMetadata.build(*([each[row] for row in rows] for each in (queries, lengths, tables)), 16)
        return backend.run(q, q[:0, :2], q[:0, :2], cache, metadata, Scores(0.25))

    found = attended(q, 0, 1, 2)
    assert launched == [
        *(("attention.attend", 16, True, 2), ("attention.merge", None, None, 2)),
        ("attention.attend", 128, False, 1),
    ]
    assert torch.equal(found, torch.cat([attended(q[:1], 0), attended(q[1:21], 1), attended(q[21:], 2)]))
