"""Alice AI: Qwen3-Next's attention and mixtures with Kimi's delta attention, over a residual in parts."""

from __future__ import annotations

from functools import partial

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import RMSNorm
from octavo.models.blocks import head_norms
from octavo.models.hybrid import has_flat_logs, kimi_delta, read_delta_sizes, read_kinds, stored_convolutions
from octavo.models.parts import PartsConfig, PartsDecoder, PartsLayer
from octavo.models.sparse import NORMALIZED, read_shared_mixture


class AliceAIForCausalLM(PartsDecoder):
    """All layers have mixtures, whose routers add a correction to sigmoids. Source: Yandex's releases."""

    RECURRENT_NAME = "linear_attn"
    RENAMED = {"shared_experts": "shared_expert"}
    REPLACED = {
        ".linear_attn.a_log_bias": ".linear_attn.A_log",
        ".attn_res_norm_weight": ".self_attention_res_norm.weight",
        ".attn_res_proj.": ".self_attention_res_proj.",
        ".mlp_res_norm_weight": ".mlp_res_norm.weight",
        "attnres_final.res_norm_weight": "output_attn_res_norm.weight",
        "attnres_final.res_proj.": "output_attn_res_proj.",
    }
    IGNORED = (*PartsDecoder.IGNORED, r"mtp\..*")

    @classmethod
    def read(cls, c: Checkpoint) -> PartsConfig:
        c.expect_all(kda_allow_negative_eigenvalues=False, router_score_function="sigmoid", router_bias_correction=True)
        sizes = read_delta_sizes(c)
        for key, value, own, other in (
            ("linear_num_key_heads", "linear_num_value_heads", sizes.key_heads, sizes.heads),
            ("linear_key_head_dim", "linear_value_head_dim", sizes.key_dim, sizes.value_dim),
        ):
            if own != other:
                raise c.error(key, f"{value}, which is {other}")
        return PartsConfig.common(
            c,
            head_dim=c.positive("head_dim", 256),
            rotary_share=0.25,
            intermediate_size=c.positive("moe_intermediate_size"),
            norm=partial(RMSNorm, offset=1.0),
            qk_norms=head_norms,
            attention_gate="q_proj",
            windows=(),
            mixture=read_shared_mixture(
                c, score="sigmoid", correction="gate.e_score_correction_bias", is_normalized=NORMALIZED[True]
            ),
            kinds=read_kinds(c),
            sizes=sizes,
            recurrence=kimi_delta(
                convolutions=stored_convolutions(c, sizes), has_flat_logs=has_flat_logs(c, ".a_log_bias", ".A_log")
            ),
            layer=PartsLayer,
            part_layers=c.positive("block_attn_res_block_size"),
        )

    def __init__(self, c: PartsConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        if self.is_first:
            self.layers["0"].self_attention_res = nn.Identity()  # there is one part, the embedding
