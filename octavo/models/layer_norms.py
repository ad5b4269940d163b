"""Families with LayerNorms: Cohere, GPT-2, GPT-NeoX, Nemotron, Phi, StableLM, StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from octavo.config.checkpoint import Checkpoint
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.heads import Heads
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer, PlainMLP, head_layer_norms, head_norms
from octavo.models.config import DecoderConfig, even_share, read_windows, turn_within_windows


class CohereForCausalLM(GatedDecoder):
    """Cohere's Command R: attention and MLP beside each other, behind one norm; heads turn in neighbouring pairs.

    In large models queries and keys have norms with weights for each head. Source: Cohere's releases.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        return cls._read(c, qk_norms=head_layer_norms if c.bool("use_qk_norm", False) else None)

    @staticmethod
    def _read(c: Checkpoint, **own: Any) -> DecoderConfig:
        return DecoderConfig.common(
            c,
            interleaved=True,
            norm=partial(LayerNorm, bias=False),
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            bias=c.bool("attention_bias", False),
            logit_multiplier=c.float("logit_scale", 0.0625),
            layer=ParallelLayer,
            **own,
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and A: windows in three of four layers, and no rotation in the others.

    Source: https://arxiv.org/abs/2504.00698.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> DecoderConfig:
        windows = read_windows(c, is_windowed=True, default=4096, pattern=4)
        return turn_within_windows(cls._read(c, windows=windows))


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
        "qkv_proj": "query_key_value",
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
            qkv_reads=(),
            qkv_by_head=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu"),
            mlp=PlainMLP,
            layer=partial(ParallelLayer, has_two_norms=True) if is_parallel else None,
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
    """StableLM: a quarter of each head turns.

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
