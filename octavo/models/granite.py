"""Granite 3 and 4, HyperCLOVA X, MiniCPM: factors at embeddings, scores, residuals and logits; mixtures of experts.

Sources: IBM's releases, https://arxiv.org/abs/2404.06395.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.layers.elementwise import Elementwise
from octavo.layers.experts import StoredExperts
from octavo.layers.norm import ScaledNorm
from octavo.models.blocks import GatedDecoder, SandwichLayer
from octavo.models.config import DecoderConfig, even_share, windows_by_kind
from octavo.models.fields import fields
from octavo.models.hybrid import HybridConfig, HybridDecoder, read_kinds, read_mamba
from octavo.models.latent import LatentConfig, LatentDecoder
from octavo.models.ropes import read_rope, ropes_by_layer
from octavo.models.sparse import Mixture, read_mixture

_MIXTURE_NAMES: Final[Mapping[str, str]] = {
    "mlp": "",
    "gate": "block_sparse_moe.router.layer",
    "experts": "block_sparse_moe",
    "shared_experts": "shared_mlp",
    "down_proj": "output_linear",
}
"""Names of a mixture's modules, for `RENAMED`."""


def _read_factors(c: Checkpoint) -> dict[str, Any]:
    """Return the factors of all Granite families: 1 unless the config says otherwise, that of the scores included.

    MiniCPM's are there by other names, and its scores have the usual factor.
    """
    residual = c.float("residual_multiplier", 1.0)
    factors: dict[str, Any] = {
        "embedding_multiplier": c.float("embedding_multiplier", 1.0),
        "attention_scale": c.float("attention_multiplier", 1.0),
        "logit_multiplier": 1.0 / c.positive_float("logits_scaling", 1.0),
    }
    if "scale_depth" in c.values or c.architecture.startswith("MiniCPM"):
        c.refuse("num_experts", because="MiniCPM with experts is not implemented")
        residual = c.positive_float("scale_depth") / c.positive("num_hidden_layers") ** 0.5
        factors = {
            "embedding_multiplier": c.positive_float("scale_emb", 1.0),
            "logit_multiplier": c.positive_float("dim_model_base", 1.0) / c.positive("hidden_size"),
            "tied": c.bool("tie_word_embeddings", True),
        }
    after = partial(SandwichLayer, after=lambda _: Elementwise("scaled", residual))
    return {**factors, "layer": None if residual == 1 else after}


def _read_mixture(c: Checkpoint, shared_width: int) -> Mixture:
    stored = StoredExperts(is_stacked=True, stacks=("input_linear.weight", "output_linear.weight"))
    own = fields(experts="num_local_experts", width="intermediate_size", shared_width=shared_width)
    return read_mixture(c, stored=stored, **own)


class GraniteForCausalLM(GatedDecoder):
    """Granite 3: Llama's block with factors, with dense MLPs or with mixtures of experts."""

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> DecoderConfig:
        own |= {"mlp_bias": c.bool("mlp_bias", False)}
        if "num_local_experts" in c.values:
            mixture = _read_mixture(c, c.count("shared_intermediate_size", 0))
            own |= {
                "mlp_bias": False,
                "mixture": mixture,
                "gate_up_reads": ("input_linear",),
                "renamed": _MIXTURE_NAMES,
            }
        return DecoderConfig.common(c, bias=c.bool("attention_bias", False), **_read_factors(c), **own)


GraniteMoeForCausalLM = GraniteMoeSharedForCausalLM = MiniCPMForCausalLM = GraniteForCausalLM


class HyperCLOVAXForCausalLM(GatedDecoder):
    """HyperCLOVA X SEED Think: Granite's factors, with norms before and after attention and MLP.

    Source: https://arxiv.org/abs/2506.22403.
    """

    RENAMED = {"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        factors, residual = _read_factors(c), c.float("residual_multiplier", 1.0)
        if c.values.get("attention_multiplier") is None:
            factors["attention_scale"] = None
        factors["logit_multiplier"] = c.positive_float("logits_scaling", 1.0)
        if c.bool("use_post_norm", True):
            factors["layer"] = partial(SandwichLayer, after=lambda c: ScaledNorm(c.hidden_size, c.norm_eps, residual))
        bias, mlp_bias = c.bool("attention_bias", False), c.bool("mlp_bias", False)
        return DecoderConfig.common(c, bias=bias, mlp_bias=mlp_bias, **factors)


class MiniCPM3ForCausalLM(LatentDecoder):
    """MiniCPM3: MiniCPM with attention over latents. Source: OpenBMB's releases."""

    @classmethod
    def read(cls, c: Checkpoint) -> LatentConfig:
        rope = read_rope(c, c.positive("qk_rope_head_dim"))
        value = even_share(c, "hidden_size", c.positive("hidden_size"), c.positive("num_attention_heads"))
        eps = c.positive_float("rms_norm_eps", 1e-5)
        return LatentConfig.common_latent(c, value_dim=value, rope=rope, norm_eps=eps, **_read_factors(c))


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """Granite with windows in three of four layers, sinks in all, and rotations that differ by layer.

    `layer_rope_theta` has 0 for a layer that does not rotate.
    """

    @classmethod
    def read(cls, c: Checkpoint, **own: Any) -> DecoderConfig:
        config = super().read(c, windows=windows_by_kind(c), has_sinks=True, **own)
        if config.mixture is not None:
            names = {**_MIXTURE_NAMES, "gate": "block_sparse_moe.router", "experts": "block_sparse_moe.experts"}
            mixture = replace(config.mixture, stored=StoredExperts(is_stacked=True))
            config = replace(config, mixture=mixture, renamed=names)
        if c.values.get("layer_rope_theta") is None or config.rope is None:
            return config
        return replace(config, ropes=ropes_by_layer(c, config.rope, config.num_layers))

    def stored_name(self, path: str) -> str:
        # stacked experts have the usual names
        return super().stored_name(path).replace(".experts.output_linear", ".experts.down_proj")


GraniteMoeSWAForCausalLM = GraniteSWAForCausalLM


class GraniteMoeHybridForCausalLM(HybridDecoder):
    """Granite 4: Mamba2 in most layers, attention in some, with Granite's factors, also with mixtures of experts.

    Attention rotates heads only where `position_embedding_type` is rope.
    """

    RECURRENT_NAME = "mamba"
    RENAMED = {"mlp": "shared_mlp", "down_proj": "output_linear"}

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        shared, bias = c.positive("shared_intermediate_size"), c.bool("attention_bias", False)
        own: dict[str, Any] = {} if c.values.get("position_embedding_type") == "rope" else {"rope": None}
        if c.values.get("num_local_experts", 8) != 0:
            own |= {"mixture": _read_mixture(c, shared), "renamed": _MIXTURE_NAMES}
        return HybridConfig.common(
            c,
            intermediate_size=shared,
            qkv_bias=bias,
            out_bias=bias,
            gate_up_reads=("input_linear",),
            windows=(),
            kinds=read_kinds(c),
            **read_mamba(c),
            **_read_factors(c),
            **own,
        )
