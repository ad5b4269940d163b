"""Llama's block with parts of a model's own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, GatedMLP
from octavo.models.llama import LlamaForCausalLM
from tests.fakes.checkpoints import make_checkpoint
from tests.models.paged_run import load, logits_of


class Doubled(nn.Module):
    """The sum of two experts, which are the same: twice an MLP."""

    def __init__(self, mlp: GatedMLP) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.mlp(x), self.mlp(x))


def test_a_model_brings_the_mlp_of_each_layer(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint("llama", tmp_path, num_hidden_layers=3))
    config, mesh = LlamaForCausalLM.read(checkpoint), Mesh.single()
    made: list[int] = []

    def mlp(index: int) -> nn.Module:
        made.append(index)
        return GatedMLP(config, mesh) if index != 1 else Doubled(GatedMLP(config, mesh))

    with torch.device("meta"):
        model = GatedDecoder(config, mesh, mlp=mlp)
    assert made == [0, 1, 2]
    paths = [path for path, _ in model.layers_by_path() if path.endswith("down_proj")]
    assert paths == ["layers.0.mlp.down_proj", "layers.1.mlp.mlp.down_proj", "layers.2.mlp.down_proj"]


def test_an_injected_mlp_computes(tmp_path: Path) -> None:
    plain, doubled = load(make_checkpoint("llama", tmp_path)), load(tmp_path)
    down = plain.layers["1"].mlp.down_proj  # type: ignore[union-attr]
    down.prepared.state()["weight"].mul_(2)
    doubled.layers["1"].mlp = Doubled(doubled.layers["1"].mlp)  # type: ignore[arg-type]
    logits = [logits_of(model) for model in (plain, doubled)]
    assert torch.equal(*logits)
