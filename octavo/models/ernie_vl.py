"""ERNIE 4.5 VL: text and images have experts of their own, beside a shared one for both.

The tokens that stand for an image belong to images, and so do the token before them and the one behind them. Source:
Baidu's releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import Experts, StoredExperts
from octavo.layers.layer import TensorSlot
from octavo.layers.routers import Router
from octavo.models.blocks import GatedDecoder, GatedLayer, GatedMLP
from octavo.models.config import DecoderConfig
from octavo.models.fields import EPS, TIED, fields, read_fields
from octavo.models.sparse import Mixture, read_mixture, sparse_by_kind

_CORRECTIONS: Final = "moe_statics.e_score_correction_bias"
_EXPERT: Final = re.compile(r"\.mlp\.experts\.(\d+)\.")
_MOVED: Final = (
    (".mlp.gate.weight_1", ".mlp.vision_moe.gate.weight"),
    (".mlp.gate.weight", ".mlp.text_moe.gate.weight"),
    (f".mlp.{_CORRECTIONS}", f".mlp.text_moe.{_CORRECTIONS}"),
)


@dataclass(frozen=True, kw_only=True)
class ErnieVLConfig(DecoderConfig):
    """image_width: activations of an expert for images; `mixture` is that of text, with as many experts."""

    image_width: int


class _ImageRouter(Router):
    """A router whose corrections are stored with those of another one."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield from (slot for slot in super().tensor_slots(path) if not slot.name.endswith(_CORRECTIONS))


class _TextRouter(Router):
    """A router whose corrections are stored [2, experts], in front of those of the router of images."""

    _images: _ImageRouter

    def __init__(self, images: _ImageRouter, experts: int, **options: Any) -> None:
        super().__init__(experts=experts, **options)
        self._shapes["correction"] = (2, experts)
        self.__dict__["_images"] = images  # which is a module elsewhere

    def _fill_beside(self, own: str, name: str, stored: Tensor) -> None:
        super()._fill_beside(own, name, stored[0])
        self._images._fill_beside(own, name, stored[1])


class _Routed(nn.Module):
    """Σ weight · expert(x) over the experts that the router chooses, plus `shared`."""

    def __init__(self, gate: Router, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, x: Tensor, shared: Tensor | None) -> Tensor:
        """x, shared [tokens, hidden] → [tokens, hidden]."""
        return self.experts(x, self.gate(x), shared)


class KindsMLP(nn.Module):
    """Mixtures of experts for text and for images, and an expert that all tokens take."""

    def __init__(self, c: ErnieVLConfig, mixture: Mixture, mesh: Mesh) -> None:
        super().__init__()
        options: dict[str, Any] = {"inputs": c.hidden_size, "experts": mixture.experts, "rule": mixture.rule}
        options |= {"correction": _CORRECTIONS, "transposed": True}
        images = _ImageRouter(**options)

        def experts(width: int) -> Experts:
            return Experts(c.hidden_size, width, mixture.experts, mesh, stored=mixture.stored)

        self.text_moe = _Routed(_TextRouter(images, **options), experts(mixture.width))
        self.vision_moe = _Routed(images, experts(c.image_width))
        shared = replace(c, intermediate_size=mixture.shared_width)
        self.shared_experts = GatedMLP(shared, mesh) if mixture.shared_width else None

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        shared = None if self.shared_experts is None else self.shared_experts(x)
        if batch.kinds is None:
            return self.text_moe(x, shared)
        out = torch.empty_like(x)
        for tokens, experts in ((batch.kinds.others, self.text_moe), (batch.kinds.images, self.vision_moe)):
            if len(tokens):
                with batch.products_of_tokens(tokens):
                    own = experts(x[tokens], None if shared is None else shared[tokens])
                out = out.index_copy(0, tokens, own)
        return out


class KindsLayer(GatedLayer):
    """Attention and an MLP that is told which tokens are of images."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), residual)
        return (self.mlp(x, batch) if isinstance(self.mlp, KindsMLP) else self.mlp(x)), residual


class Ernie4_5_VLMoeForCausalLM(GatedDecoder):  # noqa: N801
    """The text model, whose heads turn in neighbouring pairs: by rows and columns in turn, the last by time."""

    FIELDS = fields(norm_eps=EPS, tied=TIED, interleaved=True, has_image_experts=True, layer=KindsLayer)

    @classmethod
    def read(cls, c: Checkpoint) -> ErnieVLConfig:
        c.refuse("use_bias", because="experts with biases are not implemented")
        c.expect("moe_norm_min", 1e-12)
        widths: Any = c.values.get("moe_intermediate_size", [1536, 512])
        are_sizes = isinstance(widths, list) and all(type(each) is int and 0 < each <= LARGEST_SIZE for each in widths)
        if not are_sizes or len(widths) != 2:
            raise c.error("moe_intermediate_size", "two widths, of experts for text and of those for images")
        mixture = read_mixture(
            c,
            experts=("moe_num_experts", 64),
            width=widths[0],
            top_k=("moe_k", 6),
            stored=StoredExperts(),
            shared=("moe_num_shared_experts", 2),
        )
        own = fields(mixture=mixture, sparse=sparse_by_kind(c, 1), image_width=widths[1])
        return ErnieVLConfig.common(c, **own, **read_fields(c, cls.FIELDS))

    def __init__(self, c: ErnieVLConfig, mesh: Mesh) -> None:
        def mlp(layer: int) -> nn.Module:
            assert c.mixture is not None, "the family has experts"
            return KindsMLP(c, c.mixture, mesh) if c.sparse[layer] else GatedMLP(c, mesh)

        super().__init__(c, mesh, mlp=mlp)

    def own_name(self, name: str) -> str:
        """Return the name of a tensor: experts of images are numbered behind those of text."""
        assert self.config.mixture is not None, "the family has experts"
        num_experts = self.config.mixture.experts

        def placed(found: re.Match[str]) -> str:
            number = int(found[1])
            kind, own = ("text", number) if number < num_experts else ("vision", number - num_experts)
            return f".mlp.{kind}_moe.experts.{own}."

        name = _EXPERT.sub(placed, name)
        for stored, own in _MOVED:
            if name.endswith(stored):
                return name.removesuffix(stored) + own
        return name
