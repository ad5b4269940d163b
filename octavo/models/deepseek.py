"""Families with attention over latents: A.X K1, DeepSeek, Kimi K2, GLM-4.7, Mistral Large 3, openPangu and others."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedLayer, SandwichLayer, SparseMLP, stream_norm
from octavo.models.fields import BETWEEN, EPS, TIED, Read, chosen, eps, fields
from octavo.models.latent import LatentConfig, LatentDecoder
from octavo.models.mistral_names import native_name
from octavo.models.ropes import with_query_growth
from octavo.models.sparse import (
    COUNTS,
    MISTRAL,
    ROUTED,
    Mixture,
    corrected,
    dense_first,
    lacks_tensor,
    read_mixture,
    sparse_by_kind,
)


def _by_group(c: Checkpoint) -> Mixture:
    kind = c.str("topk_method", "greedy")
    if kind not in ("greedy", "group_limited_greedy"):
        raise c.error("topk_method", '"greedy" or "group_limited_greedy"')
    groups = fields(num_groups="n_group", groups_kept="topk_group") if kind == "group_limited_greedy" else {}
    return read_mixture(c, is_normalized=False, group_best=1, **ROUTED, **groups)


class DeepseekV2ForCausalLM(LatentDecoder):
    """DeepSeek V2 and V2-Lite: experts are chosen by softmax, and a group of them is as good as its best one.

    The weights of experts are not normalised, whatever `norm_topk_prob` says, as in transformers.
    Source: https://arxiv.org/abs/2405.04434.
    """

    EXPECTED = fields(scoring_func="softmax", moe_layer_freq=1)
    FIELDS = fields(mixture=Read(_by_group), sparse=Read(dense_first, 0))


class DeepseekV3ForCausalLM(LatentDecoder):
    """DeepSeek V3 and R1, Kimi K2: the router chooses from the best groups by corrected sigmoids.

    Sources: https://arxiv.org/abs/2412.19437, https://arxiv.org/abs/2507.20534.
    """

    EXPECTED = fields(moe_layer_freq=1)
    FIELDS = fields(mixture=Read(corrected, groups=(8, 4), factor=2.5), sparse=Read(dense_first, 3))


KimiK2ForCausalLM = DeepseekV3ForCausalLM


class NormedMixtureLayer(GatedLayer):
    """Attention and MLP, each behind a norm; a mixture is before one, too."""

    def __init__(self, c: LatentConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, attention, mlp)
        self.mlp_output_norm = stream_norm(c) if isinstance(mlp, SparseMLP) else None

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = super().forward(x, residual, batch)
        return x if self.mlp_output_norm is None else self.mlp_output_norm(x), residual


def _perhaps_corrected(c: Checkpoint) -> Mixture:
    mixture = corrected(c, groups=(8, 4), factor=2.5)
    return replace(mixture, correction=None) if lacks_tensor(c, ".e_score_correction_bias") else mixture


class AXK1ForCausalLM(LatentDecoder):
    """A.X K1: DeepSeek V3's blocks with a norm behind mixtures. Source: https://arxiv.org/abs/2601.09200.

    Its release stores that norm for dense layers, too, and no corrections of its router.
    """

    RENAMED = {"mlp_output_norm": "post_mlp_layernorm"}
    IGNORED = (*LatentDecoder.IGNORED, r"layers\.\d+\.post_mlp_layernorm\.weight")
    FIELDS = fields(mixture=Read(_perhaps_corrected), sparse=Read(sparse_by_kind, 1), layer=NormedMixtureLayer)


class SarvamMLAForCausalLM(LatentDecoder):
    """Sarvam 105B: DeepSeek V3's blocks with one group of experts. Source: Sarvam's releases."""

    FIELDS = fields(mixture=Read(corrected, factor=2.5, **COUNTS), sparse=Read(dense_first, 1))


class Glm4MoeLiteForCausalLM(LatentDecoder):
    """GLM-4.7-Flash: DeepSeek V3's blocks with one group of experts.

    `mlp_layer_types` says which layers are mixtures, all but the first unless given.
    Source: https://huggingface.co/zai-org/GLM-4.7-Flash.
    """

    FIELDS = fields(mixture=Read(corrected, factor=1.8), norm_eps=EPS, sparse=Read(sparse_by_kind, 1))


class Mistral4ForCausalLM(LatentDecoder):
    """Mistral Large 3 and Small 4: experts are chosen by softmax, and queries grow with positions as in Ministral 3.

    Source: Mistral AI's releases.
    """

    FIELDS = fields(mixture=Read(read_mixture, **MISTRAL), sparse=Read(dense_first, 0))

    @classmethod
    def read(cls, c: Checkpoint) -> LatentConfig:
        config: LatentConfig = super().read(c)
        if config.latent_heads.plain % 2:
            raise c.error("qk_nope_head_dim", "an even number, whose pairs grow with the position")
        return replace(config, rope=with_query_growth(c, config.rope))

    def own_name(self, name: str) -> str:
        return native_name(super().own_name(name))


MistralLarge3ForCausalLM = Mistral4ForCausalLM


class YoutuForCausalLM(LatentDecoder):
    """Youtu-LLM: gated MLPs; the head shares the embedding unless the config says otherwise.

    Source: https://arxiv.org/abs/2512.24618.
    """

    FIELDS = fields(tied=TIED)


def _perhaps_biased(c: Checkpoint) -> Mixture:
    mixture = corrected(c, correction="e_score_correction_bias")
    return mixture if c.bool("router_enable_expert_bias", False) else replace(mixture, correction=None)


class PanguUltraMoEForCausalLM(LatentDecoder):
    """openPangu Ultra: DeepSeek V3's blocks with one group of experts, and norms before and after where it says so.

    Source: https://arxiv.org/abs/2505.04519.
    """

    REFUSED = {"it is not implemented": ("param_sink_number", "rope_scaling")}
    EXPECTED = fields(n_group=1, topk_group=1)
    FIELDS = fields(
        mixture=Read(_perhaps_biased),
        sparse=Read(dense_first, 0),
        layer=chosen("sandwich_norm", False, SandwichLayer),
        latent_eps=eps("rms_norm_eps", 1e-6),
        renamed=chosen("sandwich_norm", False, BETWEEN),
    )
