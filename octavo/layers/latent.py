"""Attention over latents: one vector per token that all heads share, its first elements key and value at once.

The products that would expand a latent to the keys and values of heads are done with queries and results instead
("absorbed"), for prompts too: so that a token has the same bits however a prompt is cut. Source: DeepSeek-V2,
https://arxiv.org/abs/2405.04434.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, Parts
from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.layer import Binding, CachedLayer, Layer, PreparedLayer, TensorSlot
from octavo.layers.picked import Pick, PickedLinear
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec, heads_apart
from octavo.ops.registry import Ops


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """`count` heads over latents of `latent` elements, and `turned` elements that rotate with their position.

    A query has `plain` elements and `turned` ones, a value `value` elements.
    """

    count: int
    latent: int
    plain: int
    turned: int
    value: int

    @property
    def query(self) -> int:
        """Elements of a query before it is multiplied into the space of latents."""
        return self.plain + self.turned

    def rows_of(self, mesh: Mesh, size: int) -> tuple[slice, int]:
        """Return this rank's rows of a weight with `size` rows per head, and its heads. Raises ConfigError."""
        start, count = mesh.share(self.count, "attention heads")
        return slice(start * size, (start + count) * size), count


class LatentQueries(PreparedLayer):
    """x [tokens, inputs] → queries of this rank's heads: [tokens, heads, plain] and [tokens, heads, turned]."""

    def __init__(self, inputs: int, heads: LatentHeads, mesh: Mesh) -> None:
        self.heads, self._stored_rows = heads, heads.count * heads.query
        self._rows, self._count = heads.rows_of(mesh, heads.query)
        super().__init__(inputs, self._count * heads.query, all_outputs=self._stored_rows)

    def forward(self, x: Tensor) -> Parts:  # type: ignore[override]
        """x [tokens, inputs] → both parts, views of one tensor."""
        q, edge, heads = self.prepared(x), self._count * self.heads.plain, self.heads
        return q[:, :edge].view(len(q), self._count, heads.plain), q[:, edge:].view(len(q), self._count, heads.turned)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the weight, whose rows are head after head."""
        for held in self.fillings():
            yield self.slot(held, path, self._stored_rows, partial(self._fill, held.key), ((self._rows,),))

    def _fill(self, key: str, stored: Tensor) -> None:
        heads, plain = stored[self._rows].view(self._count, self.heads.query, -1), self.heads.plain
        self.hold(key, torch.cat((heads[:, :plain].flatten(0, 1), heads[:, plain:].flatten(0, 1))))


class GatedLatentQueries(PickedLinear):
    """x [tokens, inputs] → queries as `LatentQueries` makes them, and gates [tokens, heads · value].

    The stored tensor `name` has the gates of each head behind its query.
    """

    def __init__(self, name: str, inputs: int, heads: LatentHeads, mesh: Mesh) -> None:
        start, count = mesh.share(heads.count, "attention heads")
        each, edges = heads.query + heads.value, (0, heads.plain, heads.query, heads.query + heads.value)
        starts = range(start * each, (start + count) * each, each)
        parts = [[slice(head + first, head + end) for head in starts] for first, end in pairwise(edges)]
        super().__init__(inputs, [Pick(name, heads.count * each, rows) for rows in parts])
        self.heads, self._count = heads, count

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → both parts of queries and the gates, views of one tensor."""
        heads, count = self.heads, self._count
        sizes = [count * each for each in (heads.plain, heads.turned, heads.value)]
        plain, turned, gates = torch.split(self.prepared(x), sizes, 1)
        return plain.view(len(x), count, heads.plain), turned.view(len(x), count, heads.turned), gates


class LatentProjections(Layer):
    """The weight that expands latents to keys and values, kept as two of products by head; it is never quantised."""

    def __init__(self, heads: LatentHeads, mesh: Mesh) -> None:
        super().__init__()
        self.heads, size = heads, heads.plain + heads.value
        self._rows, self._count = heads.rows_of(mesh, size)
        self._stored_shape = heads.count * size, heads.latent
        self.weight = nn.Parameter(torch.empty(self._count * size, heads.latent), requires_grad=False)
        self._prepared: dict[str, PreparedLinear] = {}

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [tokens, heads, plain] → [tokens, heads, latent], which score latents as they are."""
        return self._prepared["keys"].by_head(q, self.heads.latent)

    def values(self, x: Tensor) -> Tensor:
        """Weighted sums of latents [tokens, heads, latent] → those of values, [tokens, heads · value]."""
        return self._prepared["values"].by_head(x, self.heads.value).flatten(1)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the weight, whose rows are head after head, those of the key before those of the value."""
        yield self.rows_slot(f"{path}.weight", self._stored_shape, self._rows)

    def finish(self) -> None:
        both, plain = self.weight.data.view(self._count, -1, self.heads.latent), self.heads.plain
        for name, heads in {"keys": both[:, :plain].transpose(1, 2), "values": both[:, plain:]}.items():
            padded = F.pad(heads, (0, 0, 0, heads_apart(heads.shape[1]) - heads.shape[1]))
            self._prepared[name] = self.ops.prepare_linear(padded.flatten(0, 1))
        self.register_parameter("weight", None)

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return {
            f"{name}.{part}": spec
            for name, shape in self._shapes().items()
            for part, spec in ops.prepare_linear.state_specs(shape).items()
        }

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{part}": tensor
            for name, prepared in self._prepared.items()
            for part, tensor in prepared.state().items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, shape in self._shapes().items():
            own = {part.removeprefix(f"{name}."): each for part, each in state.items() if part.startswith(f"{name}.")}
            self._prepared[name] = self.ops.prepare_linear.restore(shape, own)
        self.register_parameter("weight", None)

    def _shapes(self) -> dict[str, LinearShape]:
        heads, dtype = self.heads, self.weight.dtype
        return {
            "keys": LinearShape(self._count * heads_apart(heads.latent), heads.plain, dtype),
            "values": LinearShape(self._count * heads_apart(heads.value), heads.latent, dtype),
        }


class LatentAttention(CachedLayer):
    """Stores latents, and attends to those of the sequence so far; `scale` is the factor of scores."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self._backend: AttentionBackend

    def forward(self, q: Parts, latents: Parts, batch: ModelInput) -> Tensor:
        """q [tokens, heads, latent] and [tokens, heads, turned], latents [tokens, latent] and [tokens, turned].

        Returns weighted sums of latents, [tokens, heads, latent].
        """
        cache, metadata = batch.kv_caches[self.cache_index], batch.attention[self.cache_group]
        return self._backend.run_latents(q, latents, cache, metadata, self.scale)

    def bind(self, binding: Binding) -> None:
        self._backend = binding.backend
