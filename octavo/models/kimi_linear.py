"""Kimi Linear: three layers of Kimi's delta attention for each one of attention over latents in which nothing turns.

Kimi K3 and Ling 3.0 have such layers, too. Source: https://arxiv.org/abs/2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import MOST_LAYERS
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.recurrent import RecurrentSizes
from octavo.models.config import Mixer
from octavo.models.hybrid import (
    ATTENTION,
    RECURRENT,
    HybridConfig,
    HybridDecoder,
    has_flat_logs,
    kimi_delta,
    read_bound,
    read_kimi_sizes,
    read_kinds,
    stored_convolutions,
)
from octavo.models.latent import LatentBlock, LatentConfig
from octavo.models.parts import PartsConfig, PartsDecoder, PartsLayer
from octavo.models.sparse import COUNTS, NUMBERED, corrected, read_stored, sparse_by_kind

_OF_K3: Final = (
    *("activation_situ_beta", "attn_res_block_size", "latent_moe_use_norm", "mla_use_output_gate"),
    "routed_expert_hidden_size",
)
"""Keys that Kimi K3 alone has."""
_CAPS: Final = ("activation_situ_beta", "activation_situ_linear_beta")
"""The soft caps of gates and of what they multiply, the second where it is stated."""


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(HybridConfig, LatentConfig):
    """Layers with a state, and attention over latents in the others."""


@dataclass(frozen=True, kw_only=True)
class KimiK3Config(KimiLinearConfig, PartsConfig):
    """Kimi Linear over a residual in parts."""


class KimiLinearForCausalLM(HybridDecoder):
    """The whole model."""

    RECURRENT_NAME = "self_attn"
    RENAMED = {}
    # adapters have transformers' names of modules, which are not those of its checkpoints
    REPLACED = {".block_sparse_moe.": ".mlp.", ".self_attn.forget_gate.": ".self_attn."}

    @classmethod
    def read(cls, c: Checkpoint) -> KimiLinearConfig:
        c.expect_all(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1)
        own = c.section("linear_attn_config")
        for section, names in ((c, _OF_K3), (own, ("gate_lower_bound", "use_full_rank_gate"))):
            if section is not None:
                section.refuse(*names, because="models of the architecture KimiK3ForConditionalGeneration have it")
        sizes = read_kimi_sizes(c, num_heads=32)
        return KimiLinearConfig.common_latent(
            c,
            rope=None,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=(),
            mixture=corrected(c, factor=2.446, like=NUMBERED, **COUNTS),
            sparse=sparse_by_kind(c, 1),
            kinds=read_kinds(c, _default_kinds(c)),
            sizes=sizes,
            recurrence=kimi_delta(convolutions=stored_convolutions(c, sizes)),
        )


class HeadGatedLatentBlock(LatentBlock):
    """Attention over latents, whose heads are each multiplied with the sigmoid of a gate, or of one for each element
    where `has_wide_gates`."""

    def __init__(self, c: LatentConfig, mesh: Mesh, layer: int, *, has_wide_gates: bool = False) -> None:
        super().__init__(c, mesh, layer)
        heads = c.latent_heads
        start, count = mesh.share(heads.count, "attention heads")
        rows = [slice(head, head + 1) for head in range(start, start + count) for _ in range(heads.value)]
        total = heads.count
        if has_wide_gates:
            total, rows = total * heads.value, [slice(start * heads.value, (start + count) * heads.value)]
        self.head_gates = PickedLinear(c.hidden_size, [Pick("g_proj", total, rows)])
        self.gate = Elementwise("gated_by_sigmoid")

    def attended(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Return what heads attend to, times their gates: x [tokens, hidden] → [tokens, heads · value]."""
        return self.gate(super().attended(x, batch), self.head_gates(x))


class KimiK3ForConditionalGeneration(PartsDecoder):
    """The text model of Kimi K3: its layers read the residual in parts, experts are between two projections, and gates
    of attention and activations have forms of their own.

    Source: Moonshot's release.
    """

    RECURRENT_NAME = "self_attn"
    RENAMED = {}
    REPLACED = {
        **KimiLinearForCausalLM.REPLACED,
        ".routed_expert_down_proj.": ".fc1_latent_proj.",
        ".routed_expert_norm.": ".latent_norm.",
        ".routed_expert_up_proj.": ".fc2_latent_proj.",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> KimiK3Config:
        c.expect_all(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1)
        eps, sizes, kinds = c.positive_float("rms_norm_eps"), read_kimi_sizes(c, num_heads=32), _default_kinds(c)
        own: dict[str, Any] = {"activation": c.expect("hidden_act", "silu", "situ"), "numbers": ()}
        if own["activation"] == "situ":
            stated = [each for each in _CAPS if each == _CAPS[0] or c.values.get(each) is not None]
            own["numbers"] = tuple(c.positive_float(each, 1.0) for each in stated)
        width = c.optional_positive("routed_expert_hidden_size") or 0
        stored = read_stored(c, NUMBERED, width)
        mixture = corrected(c, stored=stored, latent_width=width, **COUNTS, **own)
        return KimiK3Config.common_latent(
            c,
            rope=None,
            norm_eps=eps,
            latent_eps=eps,
            windows=(),
            activation=own["activation"],
            activation_numbers=own["numbers"],
            mixture=replace(mixture, has_latent_norm=bool(width) and c.bool("latent_moe_use_norm", False)),
            sparse=sparse_by_kind(c, 0),
            kinds=read_kinds(c, kinds),
            sizes=sizes,
            attention=partial(HeadGatedLatentBlock, has_wide_gates=True)
            if c.bool("mla_use_output_gate", False)
            else LatentBlock,
            recurrence=_k3_delta(c, sizes),
            layer=PartsLayer,
            part_layers=c.positive("attn_res_block_size"),
        )


def _k3_delta(c: Checkpoint, sizes: RecurrentSizes) -> Mixer:
    section = c.section("linear_attn_config")
    bound = None
    if section is not None and section.values.get("gate_lower_bound") is not None:
        bound = read_bound(section, "gate_lower_bound")
    return kimi_delta(
        convolutions=stored_convolutions(c, sizes),
        bound=bound,
        of_low_rank="f" if section is not None and section.bool("use_full_rank_gate", False) else "fg",
        has_flat_logs=has_flat_logs(c),
    )


class BailingHybridForCausalLM(HybridDecoder):
    """Ling 3.0: five layers of Kimi's delta attention with bounded decays for each one of attention over latents, whose
    heads have gates, and mixtures of DeepSeek V3.

    Source: https://huggingface.co/inclusionAI/Ling-3.0-Flash.
    """

    RECURRENT_NAME = "self_attn"
    RENAMED = {}
    REPLACED = {
        ".word_embeddings.": ".embed_tokens.",
        ".attention.": ".self_attn.",
        ".dense.": ".o_proj.",
        ".forget_gate.": ".",
        ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> KimiLinearConfig:
        c.expect("kda_safe_gate", True)
        c.refuse("attention_bias", because="no release has it, and it is not implemented")
        layers, group = min(c.positive("num_hidden_layers"), MOST_LAYERS), c.positive("layer_group_size", 6)
        kinds = [RECURRENT if (layer + 1) % group else ATTENTION for layer in range(layers)]
        # transformers writes the sizes of these layers apart, and that of a key's turning part as head_dim
        heads = c.optional_positive("linear_num_heads") or c.positive("num_attention_heads")
        dim = c.optional_positive("linear_head_dim") or c.positive("head_dim", 128)
        taps = c.optional_positive("linear_conv_kernel_dim") or c.positive("short_conv_kernel_size", 4)
        sizes = RecurrentSizes(heads, heads, dim, dim, taps)
        bound = read_bound(c, "kda_lower_bound")
        return KimiLinearConfig.common_latent(
            c,
            windows=(),
            mixture=corrected(c, groups=(8, 4), factor=2.5, **COUNTS),
            sparse=sparse_by_kind(c, 2),
            kinds=read_kinds(c, kinds),
            sizes=sizes,
            attention=HeadGatedLatentBlock,
            recurrence=kimi_delta(convolutions=stored_convolutions(c, sizes), bound=bound, of_low_rank=""),
        )


class BailingMoeV3ForCausalLM(BailingHybridForCausalLM):
    """Ling 3.0 in the layout of its own release: layers behind the last whole group attend, too, and gates of attention
    are as it says. Source: inclusionAI's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> KimiLinearConfig:
        c.expect_all(no_kda_lora=True, score_function="sigmoid", norm_topk_prob=True)
        c.refuse("use_bias", because="it is not implemented")
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            limits = c.values.get(name) or []
            if not isinstance(limits, list) or any(limits):
                raise c.error(name, "no limits, which are not implemented")
        name = "gated_attention_proj_granularity_type"
        kind = None if c.values.get(name) is None else c.expect(name, "head_wise", "element_wise")
        block = partial(HeadGatedLatentBlock, has_wide_gates=kind == "element_wise") if kind else LatentBlock
        config, group = super().read(c), c.positive("layer_group_size", 6)
        kinds = config.kinds
        if c.values.get("layer_types") is None:
            whole = config.num_layers // group * group
            kinds = (*kinds[:whole], *(ATTENTION,) * (config.num_layers - whole))
        assert config.mixture is not None
        width = c.optional_positive("moe_shared_expert_intermediate_size")
        shared = config.mixture.shared_width if width is None else width * c.count("num_shared_experts", 1)
        factor = c.positive_float("routed_scaling_factor", 1.0)
        delta = kimi_delta(
            convolutions=stored_convolutions(c, config.sizes),
            bound=-c.float("kda_lower_bound", -5.0),
            of_low_rank="",
            has_flat_logs=has_flat_logs(c),
        )
        return replace(
            config,
            kinds=kinds,
            latent_eps=config.norm_eps,
            mixture=replace(config.mixture, shared_width=shared, rule=replace(config.mixture.rule, factor=factor)),
            attention=block,
            recurrence=delta,
        )


def _default_kinds(c: Checkpoint) -> list[str]:
    """Return the kinds of layers where `layer_types` is absent: `full_attn_layers` counts them from 1."""
    layers, linear = range(min(c.positive("num_hidden_layers"), MOST_LAYERS)), c.section("linear_attn_config")
    if linear is None or (stated := linear.values.get("full_attn_layers")) is None:
        return [ATTENTION if layer and layer % 4 == 0 else RECURRENT for layer in layers]
    if not isinstance(stated, list):
        raise linear.error("full_attn_layers", "a list of layers")
    others = linear.values.get("kda_layers")
    if others is not None and others != [layer + 1 for layer in layers if layer + 1 not in stated]:
        raise linear.error("kda_layers", "the layers that full_attn_layers leaves out, in their order")
    return [ATTENTION if layer + 1 in stated else RECURRENT for layer in layers]
