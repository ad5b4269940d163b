"""The attention layer hands its own cache and options to the backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.attention.backend import Scores
from octavo.layers.attention import PagedAttention
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding
from octavo.ops.registry import bind
from tests.layers.bound import random
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
        self.asked = rest
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
