"""Kernels find elements that lie beyond 2³¹ others: their results are those of dense tensors, and nothing is read or
written outside of what they were given."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.attention import CudaBackend, Division, RotatingCudaBackend
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.prepare_quantized import INT4
from octavo.ops.rotary import Rotation
from tests.conformance.test_sampling import make_logits, rows_of
from tests.devices.cuda.sanitizer import sanitized
from tests.devices.cuda.test_filtering import FILTERS
from tests.devices.cuda.test_logprobs import DESCRIBED
from tests.devices.cuda.test_sampler import sampler
from tests.ops.test_experts import make_stack, route_tokens

FAR = 1 << 30
"""Elements from row to row: the third one has the place 2³¹."""
NORESERVE = 0x4000
"""Of Linux: more memory may be mapped than there is."""
OPS = CudaRuntime(is_invariant=True).bind()
Compute = Callable[[Callable[[Tensor], Tensor]], Any]


def far(tensor: Tensor, dim: int = 0) -> Tensor:
    """Return a copy whose parts along a dimension lie far from each other, in memory that is taken where written."""
    strides = list(tensor.contiguous().stride())
    for before in range(dim):
        strides[before] = FAR * tensor.shape[dim] * (strides[before] // (strides[dim] * tensor.shape[dim]))
    strides[dim] = FAR
    num = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
    memory = mmap.mmap(-1, num * tensor.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def elementwise(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = place(randn(3, 48))
    return [OPS.silu_and_mul(x), OPS.soft_capped(x, 3.0), OPS.gated_by_sigmoid(x, x)]


def norms(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, heads, weight = place(randn(3, 48)), place(randn(3, 2, 24)), randn(48)
    normed = OPS.rms_norm(heads, weight[:24], 1e-6), OPS.gated_rms_norm(x, x, weight, 1e-6, 48)
    return [*normed, *OPS.add_rms_norm(x, x, weight, 1e-6)]


def products(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x, routing = place(randn(3, 96)), route_tokens(3)
    stack, _ = make_stack(OPS.prepare_linear, torch.float32, gated=True, bias=True)
    linears = OPS.prepare_linear(randn(70, 96)), OPS.prepare_quantized(INT4)(randn(70, 96))
    return [*(linear(x) for linear in linears), stack(x, routing, of_tokens=True)]


def recurrences(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    states, x = [place(randn(3, 2 * 9 * 10)) for _ in range(4)], place(randn(3, 9))
    q, v, numbers = place(randn(3, 2, 9)), place(randn(3, 2, 10)), place(randn(3, 2))
    rows = AttentionMetadata.build((3,), (6,), ((1, 2),), 4)
    heads = randn(2), randn(2), randn(2)
    found = [
        OPS.short_convolution(x, randn(5, 9), None, states[0][:, :36], rows, (x, x)),
        OPS.gated_delta_rule(q, q, v, numbers, numbers, heads[:2], states[1], rows),
        OPS.mamba2_scan(q, q, v, numbers, heads, (0.1, 1.5), states[2], rows),
        OPS.selective_scan(x, x, *v.unbind(1), (randn(9, 10).abs(), randn(10), randn(10)), states[3][:, :90], rows),
    ]
    return [*found, *states]


def attention(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = []
    metadata = AttentionMetadata.build((17, 1), (17, 18), ((3, 1), (3, 2)), 16)
    for kind, division in ((torch.float32, Division(16, 16, programs=1 << 30)), (torch.int8, Division())):
        backend = CudaBackend(CudaRuntime(is_invariant=True), kind, division)
        cache = torch.zeros(backend.cache_shape(4, 16, 1, 16), dtype=backend.element_type)
        cache = cache if place is dense else far(cache, 1)
        q, k, v = (place(randn(18, heads, 16)) for heads in (2, 1, 1))
        found += [backend.run(q, k, v, cache, metadata, Scores(0.25)), cache]
    return found


def rotation(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    cache = torch.zeros(2, 3, 2, 16, 16)
    cache = cache if place is dense else far(cache, 1)
    q, k, v = (place(randn(3, heads, 16)) for heads in (4, 2, 2))
    turned = Rotation(torch.arange(3), randn(4, 16), randn(4, 16), None, None, (0.0, 0.0), False)
    metadata = AttentionMetadata.of_slots(torch.tensor([16, 32, 47]), 16)
    backend = RotatingCudaBackend(CudaRuntime(), torch.float32)
    found = backend.rotate_and_store(q, k, v, cache, metadata, turned)
    return [found, cache, *turned.of(OPS.rotary, q, k)]


def draws(place: Callable[[Tensor], Tensor]) -> list[Any]:
    kinds = [FILTERS[2], FILTERS[5], DESCRIBED[3]]
    logits = place(make_logits("normal", 3, 2100))
    rows = rows_of([each | {"seed": 1} for each in kinds])
    return [sampler().launch(logits, rows).wait()]


def dense(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize(
    "compute",
    [elementwise, norms, rotation, attention]
    + [pytest.param(each, marks=pytest.mark.long) for each in (products, recurrences, draws)],
    ids=lambda each: each.__name__,
)
def test_results_are_those_of_dense_tensors(compute: Compute) -> None:
    expected = compute(dense)
    with sanitized() as report:
        found = compute(far)
    assert not report.faults
    assert report.counts["launches"] > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
