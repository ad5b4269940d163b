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
        """Stay as it is."""

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
