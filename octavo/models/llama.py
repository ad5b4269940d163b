"""Llama, and the families that differ from it in biases, norms, rotations and windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.released.mistral import NATIVE
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.embedding import LMHead
from octavo.models.blocks import GatedDecoder, LateNormLayer, PlainMLP, SandwichLayer, head_norms, width_norms
from octavo.models.config import DecoderConfig, read_windows
from octavo.models.fields import (
    BEHIND,
    BIAS,
    BY_KIND,
    EPS,
    GPT2,
    HEAD_DIM,
    MLP_BIAS,
    TIED,
    WHERE_STATED,
    WHERE_USED,
    Read,
    activation,
    eps,
    fields,
    flag,
)
from octavo.models.mistral_names import native_name
from octavo.models.ropes import read_turns, with_query_growth

_INTERNLM2: Final[Mapping[str, Any]] = {
    "qkv_reads": ("wqkv",),
    "is_qkv_grouped": True,
    "gate_up_reads": ("w1", "w3"),
    "renamed": {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "self_attn": "attention",
        "o_proj": "wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward",
        "down_proj": "w2",
    },
}
"""How InternLM 2 stores Llama's tensors."""


class LlamaForCausalLM(GatedDecoder):
    """Llama 2 and 3, InternLM 2 and 3, IQuest Coder, Aquila 2, XVERSE. Biases are optional, heads may have a size of
    their own.

    Sources: https://arxiv.org/abs/2407.21783, https://arxiv.org/abs/2403.17297.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.architecture == "IQuestCoderForCausalLM":
            c.refuse("clip_qkv", "use_sliding_window", because="no release has it, and it is not implemented")
        bias, mlp_bias = c.bool("attention_bias", c.bool("qkv_bias", False)), c.bool("mlp_bias", c.bool("bias", False))
        is_second = c.architecture.startswith("InternLM2For") or c.text_model_type == "internlm2"
        own = _INTERNLM2 if is_second else {}
        return DecoderConfig.common(c, bias=bias, mlp_bias=mlp_bias, **own)


InternLM2ForCausalLM = InternLM3ForCausalLM = IQuestCoderForCausalLM = LlamaForCausalLM
AquilaForCausalLM = LLaMAForCausalLM = TeleChat3ForCausalLM = XverseForCausalLM = LlamaForCausalLM


class ApertusForCausalLM(GatedDecoder):
    """Apertus: norms of query and key heads, and a plain MLP with xIELU. Source: https://arxiv.org/abs/2509.14233."""

    RENAMED = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
        "act": "act_fn",
    }
    FIELDS = fields(
        norm_eps=EPS,
        bias=BIAS,
        qk_norms=head_norms,
        mlp=PlainMLP,
        activation=Read(Checkpoint.expect, "hidden_act", "xielu", *OPERATOR_OF, default="xielu"),
    )


@dataclass(frozen=True, kw_only=True)
class PrunedConfig(DecoderConfig):
    """Adds how many of the last tokens the head does not have: they are read and not drawn."""

    num_undrawn: int

    @classmethod
    def pruned(cls, c: Checkpoint, **own: Any) -> PrunedConfig:
        """Read it from `output_vocab_size`, beside what `common` reads. Raises CheckpointError."""
        total = c.positive("vocab_size")
        drawn = c.optional_positive("output_vocab_size") or total
        if drawn > total:
            raise c.error("output_vocab_size", f"at most vocab_size, which is {total:,}")
        if drawn < total:
            c.expect("tie_word_embeddings", False)
        return cls.common(c, num_undrawn=total - drawn, **own)


class Apertus1p5TextForCausalLM(ApertusForCausalLM):
    """Apertus 1.5. The last tokens of its vocabulary stand for images and sounds, which are not read; its head may lack
    them.

    Source: https://huggingface.co/swiss-ai/Apertus-v1.5-8B.
    """

    COMMON = PrunedConfig.pruned

    def __init__(self, c: PrunedConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        if c.num_undrawn and self.lm_head is not None:
            self.lm_head = LMHead(c.hidden_size, c.vocab_size, mesh, num_unstored=c.num_undrawn)


Apertus1p5ForConditionalGeneration = Apertus1p5TextForCausalLM


class ArceeForCausalLM(GatedDecoder):
    """AFM-4.5B: Llama with a plain MLP that squares ReLUs. Source: Arcee's releases."""

    FIELDS = fields(norm_eps=EPS, bias=BIAS, mlp_bias=MLP_BIAS, activation=activation("relu2"), mlp=PlainMLP)


class CwmForCausalLM(GatedDecoder):
    """Code World Model: Llama with a window in the layers that layer_types names.

    Source: https://arxiv.org/abs/2510.02387.
    """

    FIELDS = fields(windows=BY_KIND, norm_eps=EPS, mlp_bias=MLP_BIAS)


class Ernie4_5ForCausalLM(GatedDecoder):  # noqa: N801
    """ERNIE 4.5, dense: heads turn in neighbouring pairs, and there is one switch for all biases.

    The text model of PaddleOCR-VL turns halves of heads. Source: Baidu's releases.
    """

    FIELDS = fields(
        bias=flag("use_bias"),
        mlp_bias=flag("use_bias"),
        head_dim=HEAD_DIM,
        norm_eps=EPS,
        tied=TIED,
        interleaved=Read(lambda c: not c.str("model_type", "").startswith("paddleocr_vl")),
    )


class ExaoneForCausalLM(GatedDecoder):
    """EXAONE 3 and 3.5, EXAONE Deep: Llama with GPT-2's names. Source: https://arxiv.org/abs/2412.04862."""

    PREFIXES = ("transformer.",)
    RENAMED = {**GPT2, "self_attn": "attn.attention", "o_proj": "out_proj"}
    FIELDS = fields(norm_eps=eps("layer_norm_epsilon"), gate_up_reads=("c_fc_0", "c_fc_1"))


class Exaone4ForCausalLM(GatedDecoder):
    """EXAONE 4: norms behind attention and MLP, and on each head; layers that see all tokens do not rotate.

    `sliding_window` null means that all layers see all tokens, and rotate. Source: https://arxiv.org/abs/2507.11407.
    """

    RENAMED = BEHIND
    carries_residual = False

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        is_windowed = c.values.get("sliding_window", 4096) is not None
        if c.values.get("layer_types") is None and isinstance(c.values.get("sliding_window_pattern"), str):
            raise c.error("layer_types", "the kind of each layer, where sliding_window_pattern is a string")
        return DecoderConfig.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qk_norms=head_norms,
            windows=read_windows(c, is_windowed=is_windowed, default=4096, pattern=4 if is_windowed else None),
            layer=LateNormLayer,
            turns_all=not is_windowed,
        )


def _reads_images(c: Checkpoint) -> bool:
    return c.text_model_type in ("glm4v", "glm_ocr")  # whose configs have other defaults


class GlmForCausalLM(GatedDecoder):
    """GLM-4 of 2024: half of each head turns, in neighbouring pairs, and both halves of the MLP are one tensor.

    Source: https://arxiv.org/abs/2406.12793.
    """

    FIELDS = fields(
        head_dim=Read(lambda c: c.optional_positive("head_dim") or (None if _reads_images(c) else 128)),
        rotary_share=Read(lambda c: 1.0 if _reads_images(c) else 0.5),
        interleaved=True,
        norm_eps=eps(default=1.5625e-07),
        qkv_bias=flag("attention_bias", True),
        gate_up_reads=(),
    )


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: GLM-4 with norms before and after attention and MLP."""

    RENAMED = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
    FIELDS = fields(**GlmForCausalLM.FIELDS, layer=SandwichLayer)


class HeliumForCausalLM(GatedDecoder):
    """Helium: Llama whose heads turn in neighbouring pairs. Source: https://arxiv.org/abs/2410.00037."""

    FIELDS = fields(head_dim=HEAD_DIM, interleaved=True, norm_eps=eps(default=1e-8), qkv_bias=BIAS, mlp_bias=MLP_BIAS)


class HunYuanDenseV1ForCausalLM(GatedDecoder):
    """Hunyuan's dense models: heads are normalised after they turn. Source: Tencent's releases."""

    RENAMED = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    EXPECTED = fields(use_qk_norm=True, use_cla=False)
    FIELDS = fields(norm_eps=EPS, bias=BIAS, qk_norms=head_norms, are_norms_last=True)


class MistralForCausalLM(GatedDecoder):
    """Mistral and Ministral: attention over a sliding window, in the layers that layer_types names.

    `sliding_window` null means full attention; a config without the key means the first release's 4096.
    Source: https://arxiv.org/abs/2310.06825.
    """

    FIELDS = fields(
        windows=Read(
            lambda c: read_windows(c, is_windowed=c.values.get("sliding_window", 0) is not None, default=4096)
        ),
        interleaved=flag(NATIVE),
    )

    def own_name(self, name: str) -> str:
        name = super().own_name(name)
        rope = self.config.rope
        return native_name(name) if rope is not None and rope.interleaved else name


MinistralForCausalLM = MistralForCausalLM


class Ministral3ForCausalLM(GatedDecoder):
    """Ministral 3: stretched positions, with which queries grow by `llama_4_scaling_beta` of the rotary parameters.

    Source: Mistral AI's releases.
    """

    FIELDS = fields(head_dim=HEAD_DIM, norm_eps=EPS, windows=WHERE_STATED)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        return replace(config, rope=with_query_growth(c, config.rope))


class Olmo2ForCausalLM(GatedDecoder):
    """OLMo 2: norms behind attention and MLP, and over all heads of queries and of keys.

    Source: https://arxiv.org/abs/2501.00656.
    """

    RENAMED = BEHIND
    FIELDS = fields(norm_eps=EPS, bias=BIAS, qk_norms=width_norms, layer=LateNormLayer)
    carries_residual = False


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: windows in three of four layers, whose rotation is not stretched.

    Older configs state one rotation; it is stretched in the layers that see all tokens.
    Source: https://arxiv.org/abs/2512.13961.
    """

    FIELDS = fields(windows=Read(read_windows, is_windowed=True, default=4096, pattern=4), **Olmo2ForCausalLM.FIELDS)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config: DecoderConfig = super().read(c)
        if config.rope is None or config.ropes or not config.windows:
            return config
        plain = replace(config.rope, scaling=None)
        return replace(config, ropes=tuple(config.rope if window is None else plain for window in config.windows))


class Phi3ForCausalLM(GatedDecoder):
    """Phi-3, 3.5 and 4: fused projections and LongRoPE; a part of each head may stay as it is.

    Source: https://arxiv.org/abs/2404.14219.
    """

    FIELDS = fields(rotary_share=1.0, norm_eps=EPS, qkv_reads=(), gate_up_reads=(), windows=WHERE_STATED)


class Phi3VForCausalLM(Phi3ForCausalLM):
    """Phi-3-vision and Phi-3.5-vision: Phi-3-mini, beside which is an encoder of images."""


class Phi4MMForCausalLM(Phi3ForCausalLM):
    """Phi-4-multimodal: Phi-4-mini, beside which are encoders, and adapters for what these make.

    Source: https://arxiv.org/abs/2503.01743.
    """

    REPLACED = {".base_layer.": "."}
    IGNORED = (*Phi3ForCausalLM.IGNORED, r"layers\..*\.lora_[AB]\.(?:speech|vision)\.weight")


Phi4MultimodalForCausalLM = Phi4MMForCausalLM


class Qwen2ForCausalLM(GatedDecoder):
    """Qwen2 and 2.5, MiMo: biased queries, keys and values.

    Its releases switch the sliding window off; where it is on, the layers from `max_window_layers` on have it.
    Source: https://arxiv.org/abs/2407.10671.
    """

    FIELDS = fields(qkv_bias=True, windows=WHERE_USED)


MiMoForCausalLM = Qwen2ForCausalLM


class Qwen3ForCausalLM(GatedDecoder):
    """Qwen3: norms of query and key heads, which have a size of their own; windows as in Qwen2.

    Source: https://arxiv.org/abs/2505.09388.
    """

    FIELDS = fields(head_dim=HEAD_DIM, qk_norms=head_norms, bias=BIAS, windows=WHERE_USED)


class SeedOssForCausalLM(GatedDecoder):
    """Seed-OSS: biased queries, keys and values, and a switch of its own for the bias behind attention.

    Source: ByteDance's releases.
    """

    FIELDS = fields(
        head_dim=HEAD_DIM, qkv_bias=flag("attention_bias", True), out_bias=flag("attention_out_bias"), mlp_bias=MLP_BIAS
    )


class SmolLM3ForCausalLM(GatedDecoder):
    """SmolLM3: no rotation in every fourth layer; `no_rope_layers` has 1 for layers that rotate, and 0 for others.

    Source: Hugging Face's releases.
    """

    FIELDS = fields(bias=BIAS, mlp_bias=MLP_BIAS, tied=TIED, windows=Read(read_windows, is_windowed=False))

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.values.get("layer_types") is None:
            c.expect("use_sliding_window", False)
        config: DecoderConfig = super().read(c)
        turns = read_turns(c, config.num_layers)
        return replace(config, ropes=tuple(config.rope if each else None for each in turns))
