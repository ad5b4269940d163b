"""Families with LayerNorms: Falcon, GPT-2, -J, -Neo and -NeoX, Jais, Nemotron, OLMo, Phi, StableLM, StarCoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

from octavo.config.checkpoint import Checkpoint
from octavo.layers.distance import alibi_slopes
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.heads import Heads
from octavo.layers.norm import LayerNorm, UnscaledLayerNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer, PlainMLP, head_layer_norms, head_norms
from octavo.models.config import DecoderConfig, even_share, read_windows
from octavo.models.ropes import read_rope


class FalconForCausalLM(GatedDecoder):
    """Falcon 7B to 180B: attention and a plain MLP beside each other, behind one norm or behind one each.

    Falcon-RW has them one after the other, and slopes of scores (ALiBi) in the place of rotations.
    Source: https://arxiv.org/abs/2311.16867.
    """

    PREFIXES = ("transformer.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
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


class GPT2LMHeadModel(GatedDecoder):
    """GPT-2: learned positions, pre-norm blocks, weights stored [inputs, outputs].

    The keys have names of their own; the MLP is four times as wide as the stream unless `n_inner` is set.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners".
    """

    PREFIXES = ("transformer.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "layers": "h",
        "norm": "ln_f",
        "input_layernorm": "ln_1",
        "self_attn": "attn",
        "qkv_proj": "c_attn",
        "o_proj": "c_proj",
        "post_attention_layernorm": "ln_2",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
    }
    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.(masked_)?bias",)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        c.expect("scale_attn_weights", True)
        c.expect("scale_attn_by_inverse_layer_idx", False)
        c.expect("add_cross_attention", False)
        hidden_size, num_heads = c.positive("n_embd"), c.positive("n_head")
        return DecoderConfig(
            num_layers=c.positive("n_layer"),
            hidden_size=hidden_size,
            intermediate_size=c.optional_positive("n_inner") or 4 * hidden_size,
            heads=Heads(num_heads, num_heads, even_share(c, "n_embd", hidden_size, num_heads)),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            norm=LayerNorm,
            position_offset=0,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            qkv_reads=(),
            is_transposed=True,
            mlp=PlainMLP,
            activation=c.expect("activation_function", *OPERATOR_OF, default="gelu_new"),
        )


class GPTBigCodeForCausalLM(GatedDecoder):
    """StarCoder and SantaCoder: GPT-2 whose queries share one head of keys, with weights stored [outputs, inputs].

    Source: https://arxiv.org/abs/2305.06161.
    """

    PREFIXES = GPT2LMHeadModel.PREFIXES
    RENAMED: ClassVar[Mapping[str, str]] = {k: v for k, v in GPT2LMHeadModel.RENAMED.items() if k != "qkv_proj"}
    IGNORED = GPT2LMHeadModel.IGNORED

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = GPT2LMHeadModel.read(c)
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


class GPTJForCausalLM(GatedDecoder):
    """GPT-J: attention and a plain MLP beside each other, behind one norm; a part of each head turns, in pairs.

    Source: https://github.com/kingoflolz/mesh-transformer-jax.
    """

    PREFIXES = ("transformer.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
        "embed_tokens": "wte",
        "layers": "h",
        "norm": "ln_f",
        "input_layernorm": "ln_1",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "up_proj": "fc_in",
        "down_proj": "fc_out",
    }
    IGNORED = GPT2LMHeadModel.IGNORED

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        config = GPT2LMHeadModel.read(c)
        dim, turning = config.heads.dim, c.positive("rotary_dim", 64)
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


class GPTNeoForCausalLM(GatedDecoder):
    """GPT-Neo: GPT-2 whose scores are not scaled, with a window in the layers that attention_types calls local.

    Source: https://github.com/EleutherAI/gpt-neo.
    """

    PREFIXES = GPT2LMHeadModel.PREFIXES
    RENAMED: ClassVar[Mapping[str, str]] = {
        **GPTBigCodeForCausalLM.RENAMED,
        "self_attn": "attn.attention",
        "o_proj": "out_proj",
    }
    # causal masks that old checkpoints carry along
    IGNORED = (r"h\.\d+\.attn\.attention\.(masked_)?bias",)

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        layers, hidden, heads = c.positive("num_layers"), c.positive("hidden_size"), c.positive("num_heads")
        window, stated = c.positive("window_size", 256), c.values.get("attention_types", [[["global", "local"], 12]])
        try:
            kinds = [kind for pattern, count in stated for _ in range(min(count, layers)) for kind in pattern]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != layers or any(each not in ("global", "local") for each in kinds):
            raise c.error(
                "attention_types", f'patterns of "global" and "local" with counts, for {layers} layers in all'
            )
        return DecoderConfig(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=c.optional_positive("intermediate_size") or 4 * hidden,
            heads=Heads(heads, heads, even_share(c, "hidden_size", hidden, heads)),
            vocab_size=c.positive("vocab_size"),
            max_positions=c.max_model_len(),
            norm_eps=c.positive_float("layer_norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            norm=LayerNorm,
            position_offset=0,
            attention_scale=1.0,
            out_bias=True,
            mlp_bias=True,
            windows=tuple(window if kind == "local" else None for kind in kinds),
            mlp=PlainMLP,
            activation=c.expect("activation_function", *OPERATOR_OF, default="gelu_new"),
        )


class GPTNeoXForCausalLM(GatedDecoder):
    """GPT-NeoX and Pythia: attention and a plain MLP beside each other, each behind a norm; a quarter of heads turns.

    Queries, keys and values are one tensor, head by head. Source: https://arxiv.org/abs/2204.06745.
    """

    PREFIXES = ("gpt_neox.",)
    RENAMED: ClassVar[Mapping[str, str]] = {
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

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        if c.values.get("num_key_value_heads") not in (None, c.values.get("num_attention_heads")):
            raise c.error("num_key_value_heads", "num_attention_heads: each head has keys and values of its own")
        is_parallel = c.bool("use_parallel_residual", True)
        return DecoderConfig.common(
            c,
            rotary_share=0.25,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            bias=c.bool("attention_bias", True),
            mlp_bias=True,
            qkv_reads=("query_key_value",),
            is_qkv_grouped=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu"),
            mlp=PlainMLP,
            layer=partial(ParallelLayer, has_two_norms=True) if is_parallel else None,
        )


class Jais2ForCausalLM(GatedDecoder):
    """Jais 2: Llama's attention with biases, and a plain MLP that squares ReLUs. Source: Inception's releases."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            bias=c.bool("attention_bias", True),
            mlp_bias=c.bool("mlp_bias", True),
            activation=c.expect("hidden_act", *OPERATOR_OF, default="relu2"),
            mlp=PlainMLP,
        )


class NemotronForCausalLM(GatedDecoder):
    """Nemotron and Minitron: weights of norms are around 0, half of each head turns, and a plain MLP squares ReLUs.

    Source: https://arxiv.org/abs/2402.16819.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            rotary_share=0.5,
            norm=partial(LayerNorm, offset=1.0),
            norm_eps=c.positive_float("norm_eps", 1e-5),
            bias=c.bool("attention_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
            activation=c.expect("hidden_act", *OPERATOR_OF, default="relu2"),
            mlp=PlainMLP,
        )


class OlmoForCausalLM(GatedDecoder):
    """OLMo 1 and 1.7: Llama with norms that have no weights. Source: https://arxiv.org/abs/2402.00838."""

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        limit = None if c.values.get("clip_qkv") is None else c.positive_float("clip_qkv")
        bias = c.bool("attention_bias", False)
        return DecoderConfig.common(c, norm=UnscaledLayerNorm, norm_eps=1e-5, bias=bias, qkv_limit=limit)


class PhiForCausalLM(GatedDecoder):
    """Phi-1, 1.5 and 2: attention and a plain MLP beside each other, behind one norm; half of each head turns.

    Every linear has a bias, the head included. Source: https://arxiv.org/abs/2306.11644.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "norm": "final_layernorm",
        "o_proj": "dense",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            rotary_share=0.5,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_bias=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu_new"),
            qk_norms=head_norms if c.bool("qk_layernorm", False) else None,
            mlp=PlainMLP,
            layer=ParallelLayer,
        )


class StableLmForCausalLM(GatedDecoder):
    """StableLM and Orion: a quarter of each head turns, or all of it in Orion.

    Attention and MLP may stand beside each other, and each head of queries and keys may have a norm of its own.
    Source: https://arxiv.org/abs/2402.17834.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            rotary_share=0.25,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            qkv_bias=c.bool("use_qkv_bias", False),
            qk_norms=partial(head_layer_norms, is_apart=True) if c.bool("qk_layernorm", False) else None,
            layer=ParallelLayer if c.bool("use_parallel_residual", False) else None,
        )


OrionForCausalLM = StableLmForCausalLM


class Starcoder2ForCausalLM(GatedDecoder):
    """StarCoder2: a plain GELU MLP, and one switch for all biases; `sliding_window` null means full attention.

    Source: https://arxiv.org/abs/2402.19173.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"up_proj": "c_fc", "down_proj": "c_proj"}

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        bias = c.bool("use_bias", True)
        return DecoderConfig.common(
            c,
            norm=LayerNorm,
            norm_eps=c.positive_float("norm_epsilon", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            bias=bias,
            mlp_bias=bias,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu_pytorch_tanh"),
            windows=read_windows(c, is_windowed=c.values.get("sliding_window") is not None),
            mlp=PlainMLP,
        )
