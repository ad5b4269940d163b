"""Mixtures of experts of transformers' classes: octavo's experts behind their routers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.layers.experts import Experts, StoredExperts
from octavo.ops.experts import routing_of


class RoutedExperts(nn.Module):
    """Octavo's experts, called as transformers' are."""

    def __init__(self, experts: Experts, num_experts: int) -> None:
        super().__init__()
        self.octavo = experts
        self._num_experts = num_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., hidden], the chosen experts and their weights [tokens, top_k] → [..., hidden]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = routing_of(top_k_index, top_k_weights.float(), self._num_experts)
        out: Tensor = self.octavo(rows, routing)
        return out.view(hidden_states.shape)


def is_experts(module: Any) -> bool:
    """Whether a module holds the stacked weights of experts."""
    return {"gate_up_proj", "down_proj"} == {name for name, each in module._parameters.items() if each is not None}


def octavo_experts(module: Any, stored: StoredExperts) -> RoutedExperts | None:
    """Return the experts that compute what a module of transformers does; None where there are none."""
    up, down = module.gate_up_proj, module.down_proj
    if getattr(module, "is_transposed", False) or up.dim() != 3:
        return None
    experts, hidden, width = down.shape
    x = torch.linspace(-4.0, 4.0, 64, device="cpu")
    functions = {"silu": F.silu(x), "gelu_pytorch_tanh": F.gelu(x, approximate="tanh")}
    found = getattr(module, "act_fn", F.silu)(x)
    name = next((name for name, expected in functions.items() if torch.allclose(found, expected, 1e-6, 1e-6)), None)
    if name is None or tuple(up.shape) != (experts, 2 * width, hidden):
        return None
    return RoutedExperts(Experts(hidden, width, experts, Mesh.single(), stored=stored, activation=name), experts)


def stored_like(causal: Any) -> StoredExperts:
    """Return how checkpoints of the class hold experts, as transformers' table of conversions says."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    names: dict[str, list[str]] = {}
    for step in get_model_conversion_mapping(causal):
        target = step.target_patterns[0].rpartition("experts.")[2]
        if target in ("gate_up_proj", "down_proj") and all("*" in source for source in step.source_patterns):
            names[target] = [source.removesuffix(".weight").rpartition(".")[2] for source in step.source_patterns]
    match names.get("gate_up_proj"), names.get("down_proj"):
        case [gate, up], [down]:
            return StoredExperts(gate, up, down)
    return StoredExperts(is_stacked=True)
