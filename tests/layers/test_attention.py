"""The attention layer hands its own cache and options to the backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.attention.backend import Scores
from octavo.layers.attention import PagedAttention
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding
from octavo.layers.rope import Rope
from octavo.layers.rotary import Rotary
from octavo.ops.registry import bind
from tests.layers.bound import fill, random
from tests.layers.test_rotary import make_batch


class Recorder:
    """A backend that answers its queries and remembers how it was asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.asked: tuple[Any, ...] = ()

    def cache_shape(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_blocks, block_size, kv_heads, head_dim

    def workspace_bytes(self, *_: int, **__: int) -> int:
        return 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        self.asked, self.written = rest, (k, v)
        return q


def test_a_layer_uses_its_own_cache_and_flattens_heads() -> None:
    backend, caches = Recorder(), [object(), object()]
    layer = PagedAttention(Heads(4, 2, 16), sliding_window=7, soft_cap=3.0)
    layer.cache_index = layer.cache_group = 1
    layer.bind(Binding(bind(), backend))
    batch: Any = make_batch(0, 1)
    object.__setattr__(batch, "kv_caches", caches)
    object.__setattr__(batch, "attention", [object(), object()])
    q = random(2, 4, 16)
    assert torch.equal(layer(q, random(2, 2, 16), random(2, 2, 16), batch), q.view(2, 64))
    assert backend.asked == (caches[1], batch.attention[1], Scores(0.25, 7, 3.0))


class RotatingRecorder(Recorder):
    """A backend that writes keys where it rotates them."""

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        self.rotated = (k, v, *rest)
        return q + 1


def test_heads_are_rotated_by_the_backend_that_writes_them_and_else_by_the_operator() -> None:
    rotary, cache = fill(Rotary(Rope(16, 10_000.0)), {}), object()
    batch: Any = make_batch(3, 4)
    object.__setattr__(batch, "kv_caches", [cache])
    q, k, v = (random(2, heads, 16) for heads in (4, 2, 2))
    rotation = rotary.rotation(batch)
    results, written = [], []
    for backend in (Recorder(), RotatingRecorder()):
        layer = PagedAttention(Heads(4, 2, 16))
        layer.bind(Binding(bind(), backend))
        results.append(layer(q, k, v, batch, rotation).view(2, 4, 16))
        written.append(backend.written)
    turned = rotary(q, k, batch)
    assert torch.equal(results[0], turned[0])
    assert torch.equal(written[0][0], turned[1])
    assert torch.equal(results[1], q + 1)
    assert [len(each) for each in written[1]] == [0, 0]
    assert isinstance(backend, RotatingRecorder)
    assert all(
        one is other for one, other in zip(backend.rotated, (k, v, cache, batch.attention[0], rotation), strict=True)
    )
