"""Families with LayerNorms: Falcon, GPT-2, -J, -Neo and -NeoX, JAIS, Nemotron, OLMo, Phi, StableLM, StarCoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.distance import alibi_slopes
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.heads import Heads
from octavo.layers.linear import joined_linear
from octavo.layers.norm import LayerNorm, UnscaledLayerNorm
from octavo.models.blocks import GatedDecoder, GatedMLP, ParallelLayer, PlainMLP, head_layer_norms, head_norms
from octavo.models.config import DecoderConfig, even_share
from octavo.models.fields import BIAS, GPT2, MLP_BIAS, TIED, WHERE_STATED, Read, activation, chosen, eps, fields, flag
from octavo.models.ropes import read_rope


class FalconForCausalLM(GatedDecoder):
    """Falcon 7B to 180B: attention and a plain MLP beside each other, behind one norm or behind one each.

    Falcon-RW has them one after the other, and slopes of scores (ALiBi) in the place of rotations.
    Source: https://arxiv.org/abs/2311.16867.
    """

    PREFIXES = ("transformer.",)
    RENAMED = {
        "embed_tokens": "word_embeddings",
        "layers": "h",
        "norm": "ln_f",
        "self_attn": "self_attention",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        hidden, num_heads, bias = c.positive("hidden_size"), c.positive("num_attention_heads"), c.bool("bias", False)
        is_new, is_parallel = c.bool("new_decoder_architecture", False), c.bool("parallel_attn", True)
        kv = c.positive("num_kv_heads", num_heads) if is_new or not c.bool("multi_query", True) else 1
        has_two = is_parallel and c.positive("num_ln_in_parallel_attn", 2 if is_new else 1) == 2
        if num_heads % kv:
            raise c.error("num_kv_heads", f"a divisor of num_attention_heads, which is {num_heads}")
        names = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"} if has_two else {}
        dim = even_share(c, "hidden_size", hidden, num_heads)
        config = DecoderConfig.common(
            c,
            intermediate_size=c.optional_positive("ffn_hidden_size") or 4 * hidden,
            heads=Heads(num_heads, kv, dim),
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            bias=bias,
            mlp_bias=bias,
            qkv_reads=("query_key_value",),
            is_qkv_grouped=True,
            activation=c.expect("activation", *OPERATOR_OF, default="gelu"),
            mlp=PlainMLP,
            layer=partial(ParallelLayer, has_two_norms=has_two) if is_parallel else None,
            renamed={**cls.RENAMED, **names},
        )
        if not c.bool("alibi", False):
            return config
        # slopes of scores that are not scaled yet
        return replace(config, rope=None, slopes=tuple(slope * dim**-0.5 for slope in alibi_slopes(num_heads)))


def _gpt2_config(c: Checkpoint, layers: str, width: str, heads: str, inner: str, **own: Any) -> DecoderConfig:
    """Return the config of GPT-2 and its like, which learn positions, with the fields `own`.

    The other arguments are keys: of the number of layers, the width, the heads and the width of the MLP.
    """
    hidden, num_heads = c.positive(width), c.positive(heads)
    return DecoderConfig(
        num_layers=c.positive(layers),
        hidden_size=hidden,
        intermediate_size=c.optional_positive(inner) or 4 * hidden,
        heads=Heads(num_heads, num_heads, even_share(c, width, hidden, num_heads)),
        vocab_size=c.positive("vocab_size"),
        max_positions=c.max_model_len(),
        norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
        tied=c.bool("tie_word_embeddings", True),
        norm=LayerNorm,
        position_offset=0,
        out_bias=True,
        mlp_bias=True,
        mlp=PlainMLP,
        activation=own.pop("activation", None) or c.expect("activation_function", *OPERATOR_OF, default="gelu_new"),
        **own,
    )


class GPT2LMHeadModel(GatedDecoder):
    """GPT-2: learned positions, pre-norm blocks, weights stored [inputs, outputs].

    The keys have names of their own; the MLP is four times as wide as the stream unless `n_inner` is set.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners".
    """

    PREFIXES: ClassVar[tuple[str, ...]] = ("transformer.",)
    RENAMED = GPT2
    # causal masks that old checkpoints carry along
    IGNORED: ClassVar[tuple[str, ...]] = (r"h\.\d+\.attn\.(masked_)?bias",)
    EXPECTED = fields(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    OWN: ClassVar[Mapping[str, Any]] = {}
    """Fields that the config does not state."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect_all(**cls.EXPECTED)
        names = "n_layer", "n_embd", "n_head", "n_inner"
        return _gpt2_config(c, *names, qkv_bias=True, qkv_reads=(), is_transposed=True, **cls.OWN)


class _TransposedMLP(GatedMLP):
    """A gated MLP whose weights are stored [inputs, outputs]."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.gate_up_proj.transposed = True
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias, transposed=True)


class JAISLMHeadModel(GPT2LMHeadModel):
    """JAIS: GPT-2 with slopes or learned positions, a gated MLP, and factors of scores, embeddings and logits (muP).

    Source: https://arxiv.org/abs/2308.16149.
    """

    # tables that follow from the config
    IGNORED = (r"relative_pe\.slopes", *GPT2LMHeadModel.IGNORED)
    EXPECTED = fields(activation_function="swiglu", scale_attn_weights=True, add_cross_attention=False)
    OWN = {"activation": "silu"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.refuse("alibi_scaling", "scale_attn_by_inverse_layer_idx", because="this variant of JAIS is not implemented")
        config, is_learned = super().read(c), c.expect("position_embedding_type", "learned", "alibi") == "learned"
        by_dim = c.bool("scale_qk_dot_by_d", c.bool("mup_scale_qk_dot_by_d", False))
        logits = c.positive_float("mup_output_alpha", 1.0) * c.positive_float("mup_width_scale", 1.0)
        return replace(
            config,
            position_offset=0 if is_learned else None,
            slopes=() if is_learned else alibi_slopes(config.heads.query),
            attention_scale=config.heads.dim ** -(1.0 if by_dim else 0.5),
            embedding_multiplier=c.positive_float("embeddings_scale", c.positive_float("mup_embeddings_scale", 1.0)),
            logit_multiplier=c.positive_float("width_scale", logits),
            gate_up_reads=("c_fc2", "c_fc"),
            mlp=_TransposedMLP,
        )


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """StarCoder and SantaCoder: GPT-2 whose queries share one head of keys, with weights stored [outputs, inputs].

    Source: https://arxiv.org/abs/2305.06161.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        heads = replace(config.heads, kv=1) if c.bool("multi_query", True) else config.heads
        activation = c.expect("activation_function", *OPERATOR_OF, default="gelu_pytorch_tanh")
        return replace(
            config,
            heads=heads,
            activation=activation,
            is_transposed=False,
            qkv_reads=("c_attn",),
            is_qkv_grouped=True,
        )


class GPTJForCausalLM(GPT2LMHeadModel):
    """GPT-J: attention and a plain MLP beside each other, behind one norm; a part of each head turns, in pairs.

    Source: https://github.com/kingoflolz/mesh-transformer-jax.
    """

    RENAMED = {**GPT2, "o_proj": "out_proj", "up_proj": "fc_in", "down_proj": "fc_out"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        dim, turning = config.heads.dim, c.positive("rotary_dim", 64)
        if turning > dim:
            raise c.error("rotary_dim", f"at most the {dim} elements of a head")
        return replace(
            config,
            tied=c.bool("tie_word_embeddings", False),
            position_offset=None,
            rope=read_rope(c, dim, share=turning / dim, interleaved=True),
            qkv_bias=False,
            out_bias=False,
            head_bias=True,
            is_transposed=False,
            qkv_reads=("q_proj", "k_proj", "v_proj"),
            layer=ParallelLayer,
        )


class CodeGenForCausalLM(GPTJForCausalLM):
    """CodeGen: GPT-J whose queries, values and keys are one tensor, in four parts.

    Source: https://arxiv.org/abs/2203.13474.
    """

    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.causal_mask",)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = super().read(c)
        if config.heads.query % 4:
            raise c.error("n_head", "a multiple of 4, the parts of the tensor of queries, values and keys")
        return replace(config, qkv_reads=("qkv_proj",), is_qkv_grouped=True, qkv_shards=4)


class GPTNeoForCausalLM(GatedDecoder):
    """GPT-Neo: GPT-2 whose scores are not scaled, with a window in the layers that attention_types calls local.

    Source: https://github.com/EleutherAI/gpt-neo.
    """

    PREFIXES = GPT2LMHeadModel.PREFIXES
    RENAMED = {**GPT2, "self_attn": "attn.attention", "o_proj": "out_proj"}
    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.attention\.(masked_)?bias",)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        layers = c.positive("num_layers")
        window, stated = c.positive("window_size", 256), c.values.get("attention_types", [[["global", "local"], 12]])
        try:
            kinds = [kind for pattern, count in stated for _ in range(min(count, layers)) for kind in pattern]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != layers or any(each not in ("global", "local") for each in kinds):
            raise c.error(
                "attention_types", f'patterns of "global" and "local" with counts, for {layers} layers in all'
            )
        windows = tuple(window if kind == "local" else None for kind in kinds)
        names = "num_layers", "hidden_size", "num_heads", "intermediate_size"
        return _gpt2_config(c, *names, attention_scale=1.0, windows=windows)


class GPTNeoXForCausalLM(GatedDecoder):
    """GPT-NeoX and Pythia: attention and a plain MLP beside each other, each behind a norm; a quarter of heads turns.

    Queries, keys and values are one tensor, head by head. Source: https://arxiv.org/abs/2204.06745.
    """

    PREFIXES = ("gpt_neox.",)
    RENAMED = {
        "embed_tokens": "embed_in",
        "norm": "final_layer_norm",
        "lm_head": "embed_out",
        "self_attn": "attention",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    }
    # causal masks and frequencies that old checkpoints carry along
    IGNORED = (r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",)
    FIELDS = fields(
        rotary_share=0.25,
        norm=LayerNorm,
        norm_eps=eps("layer_norm_eps"),
        bias=flag("attention_bias", True),
        mlp_bias=True,
        qkv_reads=("query_key_value",),
        is_qkv_grouped=True,
        activation=activation("gelu"),
        mlp=PlainMLP,
        layer=chosen("use_parallel_residual", True, partial(ParallelLayer, has_two_norms=True)),
    )

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.values.get("num_key_value_heads") not in (None, c.values.get("num_attention_heads")):
            raise c.error("num_key_value_heads", "num_attention_heads: each head has keys and values of its own")
        return super().read(c)


class Jais2ForCausalLM(GatedDecoder):
    """Jais 2: Llama's attention with biases, and a plain MLP that squares ReLUs. Source: Inception's releases."""

    FIELDS = fields(
        norm=LayerNorm,
        norm_eps=eps("layer_norm_eps"),
        bias=flag("attention_bias", True),
        mlp_bias=flag("mlp_bias", True),
        activation=activation("relu2"),
        mlp=PlainMLP,
    )


class NemotronForCausalLM(GatedDecoder):
    """Nemotron and Minitron: weights of norms are around 0, half of each head turns, and a plain MLP squares ReLUs.

    Source: https://arxiv.org/abs/2402.16819.
    """

    FIELDS = fields(
        rotary_share=0.5,
        norm=partial(LayerNorm, offset=1.0),
        norm_eps=eps("norm_eps"),
        bias=BIAS,
        mlp_bias=MLP_BIAS,
        activation=activation("relu2"),
        mlp=PlainMLP,
    )


class OlmoForCausalLM(GatedDecoder):
    """OLMo 1 and 1.7: Llama with norms that have no weights. Source: https://arxiv.org/abs/2402.00838."""

    FIELDS = fields(
        qkv_limit=Read(lambda c: None if c.values.get("clip_qkv") is None else c.positive_float("clip_qkv")),
        bias=BIAS,
        norm=UnscaledLayerNorm,
        norm_eps=1e-5,
    )


class PhiForCausalLM(GatedDecoder):
    """Phi-1, 1.5 and 2: attention and a plain MLP beside each other, behind one norm; half of each head turns.

    Every linear has a bias, the head included. Source: https://arxiv.org/abs/2306.11644.
    """

    RENAMED = {
        "norm": "final_layernorm",
        "o_proj": "dense",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }
    FIELDS = fields(
        rotary_share=0.5,
        norm=LayerNorm,
        norm_eps=eps("layer_norm_eps"),
        bias=True,
        mlp_bias=True,
        head_bias=True,
        activation=activation("gelu_new"),
        qk_norms=chosen("qk_layernorm", False, head_norms),
        mlp=PlainMLP,
        layer=ParallelLayer,
    )


class StableLmForCausalLM(GatedDecoder):
    """StableLM and Orion: a quarter of each head turns, or all of it in Orion.

    Attention and MLP may stand beside each other, and each head of queries and keys may have a norm of its own.
    Source: https://arxiv.org/abs/2402.17834.
    """

    RENAMED = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
    FIELDS = fields(
        rotary_share=0.25,
        norm=LayerNorm,
        norm_eps=eps("layer_norm_eps"),
        qkv_bias=flag("use_qkv_bias"),
        qk_norms=chosen("qk_layernorm", False, partial(head_layer_norms, is_apart=True)),
        layer=chosen("use_parallel_residual", False, ParallelLayer),
    )


OrionForCausalLM = StableLmForCausalLM


class Starcoder2ForCausalLM(GatedDecoder):
    """StarCoder2: a plain GELU MLP, and one switch for all biases; `sliding_window` null means full attention.

    Source: https://arxiv.org/abs/2402.19173.
    """

    RENAMED = {"up_proj": "c_fc", "down_proj": "c_proj"}
    FIELDS = fields(
        bias=flag("use_bias", True),
        mlp_bias=flag("use_bias", True),
        norm=LayerNorm,
        norm_eps=eps("norm_epsilon"),
        tied=TIED,
        activation=activation("gelu_pytorch_tanh"),
        windows=WHERE_STATED,
        mlp=PlainMLP,
    )
