"""Routers of mixtures: small products that choose the experts of each token and weigh them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.layer import TensorSlot
from octavo.layers.linear import ColumnLinear
from octavo.ops.experts import RouterRule, Routing
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.method import Methods


class ExactLinear(ColumnLinear):
    """A small product that is whole on every rank, never quantised, and returned in float32."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, transposed: bool = False) -> None:
        super().__init__(inputs, outputs, Mesh.single(), bias=bias, transposed=transposed)

    def use(self, methods: Methods, path: str) -> None:
        """Do nothing: the weight stays as it is stored."""

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → float32 [tokens, outputs]."""
        return self.prepared.in_float32(x)


class Router(ExactLinear):
    """x [tokens, inputs] → the experts of each token.

    `correction` and `factors` name tensors [experts], beside the router in the checkpoint's tree: of what is added to
    scores or logits for the choice, stored [1, experts] where `is_correction_row`, and of what weights are multiplied
    with.
    """

    def __init__(
        self,
        inputs: int,
        experts: int,
        rule: RouterRule,
        *,
        bias: bool = False,
        correction: str | None = None,
        is_correction_row: bool = False,
        factors: str | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(inputs, experts, bias=bias, transposed=transposed)
        self.rule, self._experts = rule, experts
        self._shapes = {"correction": (1, experts) if is_correction_row else (experts,), "factors": (experts,)}
        names = {"correction": correction, "factors": factors}
        self._names = {own: name for own, name in names.items() if name is not None}
        self._beside: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Routing:  # type: ignore[override]
        """x [tokens, inputs] → routing."""
        logits, get = self.prepared.in_float32(x), self._beside.get
        return self.ops.route(logits, self.rule, get("correction"), get("factors"))

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield from super().tensor_slots(path)
        for own, beside in self._names.items():
            name = f"{path.rpartition('.')[0]}.{beside}".removeprefix(".")
            yield TensorSlot(name, self._shapes[own], partial(self._fill_beside, own, name))

    def _fill_beside(self, own: str, name: str, stored: Tensor) -> None:
        values = stored.float().reshape(-1).clone()
        if not values.isfinite().all():  # with which worse experts are chosen, and no result is NaN
            raise CheckpointError(
                f"{name} holds NaN or an infinity, with which no expert can be chosen; the checkpoint is damaged, "
                "download it again"
            )
        self._beside[own] = values

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        own = {name: TensorSpec((self._experts,), torch.float32) for name in self._names}
        return {**super().state_specs(ops), **own}

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **self._beside}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = dict(state)
        self._beside = {name: own.pop(name) for name in self._names}
        super().restore(own)


class TableRouter(ExactLinear):
    """A router whose choice is stored for each token of the vocabulary: `tid2eid` [tokens, top_k] beside its weight."""

    def __init__(self, inputs: int, experts: int, rule: RouterRule, vocab_size: int) -> None:
        super().__init__(inputs, experts)
        self.rule, self._experts, self._shape_of_table = rule, experts, (vocab_size, rule.top_k)
        self._table: Tensor

    def forward(self, x: Tensor, token_ids: Tensor) -> Routing:  # type: ignore[override]
        """x [tokens, inputs], token_ids int64 [tokens] → routing."""
        chosen = self._table.new_empty((len(x), self.rule.top_k)) if x.is_meta else self._table[token_ids]
        return self.ops.route_to(self.prepared.in_float32(x), self.rule, chosen)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield from super().tensor_slots(path)
        name = f"{path}.tid2eid"
        yield TensorSlot(name, self._shape_of_table, partial(self._fill_table, name), dtype=torch.int64)

    def _fill_table(self, name: str, stored: Tensor) -> None:
        if stored.min() < 0 or stored.max() >= self._experts:
            raise CheckpointError(
                f"{name} names experts from {int(stored.min())} to {int(stored.max())}, expected 0 to "
                f"{self._experts - 1}; the checkpoint is damaged, or config.json belongs to another"
            )
        ordered = stored.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()
        if len(twice):  # kernels have one row for each expert of a token
            raise CheckpointError(
                f"{name} names an expert twice for token {int(twice[0])}, expected {stored.shape[1]} different ones; "
                "the checkpoint is damaged"
            )
        self._table = stored.to(torch.int64).clone()

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return {**super().state_specs(ops), "table": TensorSpec(self._shape_of_table, torch.int64)}

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "table": self._table}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = dict(state)
        self._table = own.pop("table")
        super().restore(own)
