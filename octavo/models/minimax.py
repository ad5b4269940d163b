"""MiniMax-Text-01 and M1: lightning attention in most layers, softmax in the others, and mixtures of experts.

Source: https://arxiv.org/abs/2501.08313.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise, addition
from octavo.layers.lightning import LightningAttention, lightning_sizes
from octavo.models.blocks import GatedDecoder, stream_norm
from octavo.models.config import even_share
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, read_kinds
from octavo.models.sparse import NUMBERED, numbered_names, read_mixture

Factors = tuple[float, float]
"""The factor of the stream, and that of the block's output that is added to it."""


@dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(HybridConfig):
    """Adds the factors of sums."""

    linear_factors: Factors
    full_factors: Factors
    mlp_factors: Factors


class WeightedSum(nn.Module):
    """A sum whose terms have a factor each."""

    def __init__(self, factors: Factors) -> None:
        super().__init__()
        self.factors = nn.ModuleList(Elementwise("scaled", each) for each in factors)
        self.add = addition()

    def forward(self, *terms: Tensor) -> Tensor:
        """Return the sum of two terms, each [tokens, hidden]."""
        return self.add(*(factor(term) for factor, term in zip(self.factors, terms, strict=True)))


class NormedStreamLayer(nn.Module):
    """Attention and MLP, each behind a norm, whose result is the stream from there on."""

    def __init__(self, c: MiniMaxConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        is_linear = isinstance(attention, LightningAttention)
        self.input_layernorm, self.self_attn = stream_norm(c), attention
        self.join_attention = WeightedSum(c.linear_factors if is_linear else c.full_factors)
        self.post_attention_layernorm, self.mlp = stream_norm(c), mlp
        self.join_mlp = WeightedSum(c.mlp_factors)

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:
        """Return (the stream [tokens, hidden], None)."""
        x = self.input_layernorm(x)
        x = self.post_attention_layernorm(self.join_attention(x, self.self_attn(x, batch)))
        return self.join_mlp(x, self.mlp(x)), None


def _lightning(c: MiniMaxConfig, mesh: Mesh, layer: int) -> LightningAttention:
    depth = layer / max(c.num_layers - 1, 1)
    return LightningAttention(c.sizes, c.hidden_size, mesh, 1 - depth + 1e-5)


class MiniMaxForCausalLM(GatedDecoder):
    """The whole model."""

    carries_residual = False
    # buffers that transformers keeps beside the weights and that follow from the config
    IGNORED = (r"layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",)

    @classmethod
    def read(cls, c: Checkpoint) -> MiniMaxConfig:
        c.expect("postnorm", True)
        c.refuse("shared_intermediate_size", because="no release has a shared expert, and it is not implemented")
        factors, hidden = partial(_factors, c), c.positive("hidden_size")
        dim = c.optional_positive("head_dim") or even_share(c, "hidden_size", hidden, c.positive("num_attention_heads"))
        return MiniMaxConfig.common(
            c,
            head_dim=dim,
            rotary_share=(c.optional_positive("rotary_dim") or dim) / dim,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=(),
            layer=NormedStreamLayer,
            mixture=read_mixture(
                c,
                NUMBERED,
                experts=("num_local_experts", 8),
                width="intermediate_size",
                top_k=("num_experts_per_tok", 2),
            ),
            renamed=numbered_names(c),
            kinds=_kinds(c),
            sizes=lightning_sizes(c.positive("num_attention_heads"), dim),
            recurrence=_lightning,
            linear_factors=factors("linear_attn", "linear_attention"),
            full_factors=factors("full_attn", "full_attention"),
            mlp_factors=factors("mlp", "mlp"),
        )


MiniMaxText01ForCausalLM = MiniMaxM1ForCausalLM = MiniMaxForCausalLM


def _factors(c: Checkpoint, name: str, older: str) -> Factors:
    """Return the factors that a config has by their name of today or by that of the releases."""
    alpha, beta = (
        c.float(f"{name}_{each}_factor", c.float(f"layernorm_{older}_{each}", 1.0)) for each in ("alpha", "beta")
    )
    return alpha, beta


def _kinds(c: Checkpoint) -> tuple[str, ...]:
    """Return the kinds of layers: those of `layer_types`, or of `attn_type_list`, where 1 stands for softmax."""
    stated, names = c.values.get("attn_type_list"), (RECURRENT, ATTENTION)
    if isinstance(stated, list):
        return read_kinds(c, [names[each == 1] for each in stated])
    return read_kinds(c, [names[(layer + 1) % 2] for layer in range(min(c.positive("num_hidden_layers"), MOST_LAYERS))])
