"""llama.cpp's architectures in the layout of Hugging Face: for each a class, keys of its config, names of tensors.

An architecture is a line of `ARCHITECTURES`. Names of metadata and tensors are those of gguf-py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from octavo.errors import UnsupportedModel
from octavo.gguf import configs, encoders, hybrids, layer_norms, mixtures, names, orders
from octavo.gguf.metadata import Metadata

Make = configs.ConfigOf
"""Returns what an architecture's config has beyond the common keys, which are given."""
RowsOf = Callable[[Metadata, str], orders.Order]
"""Returns the order of a tensor's rows and columns, given its name in a layer."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures."""

    family: str
    """The class of transformers."""
    make: Make
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in a layer that differ from the usual ones (`names.LAYER`)."""
    is_permuted: bool = False
    """The converter has put the rows of queries and keys in pairs."""
    shift: float = 0.0
    """The number that the converter has added to weights of norms."""
    tops: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors outside the layers that differ from the usual ones (`names.TOPS`)."""
    rows: RowsOf | None = None
    """The tensors whose rows or columns the converter has put into another order."""
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Tensors whose values are in the metadata, one number for each layer: by key, the name in a layer and the
    shape."""
    apart: tuple[str, ...] = ()
    """Tensors outside the layers that the model does not read."""
    may_vary: bool = False
    """Layers differ in heads or width."""
    has_states: bool = False
    """Layers without attention keep states; metadata count no heads there, and no MLP where none has one."""


_VARIANTS: Final[tuple[tuple[str, str, Callable[[Metadata], object]], ...]] = (
    ("llama", "experts", lambda meta: meta.values.get("expert_count")),
    ("deepseek2", "sigmoid", lambda meta: meta.values.get("expert_gating_func", 1) == 2),
    ("granitemoe", "shared", lambda meta: meta.values.get("expert_shared_feed_forward_length")),
    ("mamba", "norms", lambda meta: meta.bool("ssm.dt_b_c_rms", False)),
    ("olmo2", "windows", lambda meta: "attention.sliding_window" in meta.values),
    ("falcon", "norms", lambda meta: meta.has("attn_norm_2.weight")),
    ("granitehybrid", "rotated", lambda meta: meta.bool("rope.scaling.finetuned", True)),
    ("bert", "joined", lambda meta: meta.has("attn_qkv.weight")),
    ("bert", "distilled", lambda meta: "token_types.weight" not in meta.types),
    ("jina-bert-v2", "halves", lambda meta: meta.has("ffn_gate.weight")),
)
"""Architectures that several families have: by name, which of them a file is where the condition holds."""


def architecture_of(meta: Metadata) -> Architecture:
    """Return the architecture of a file. Raises UnsupportedModel, with the names of those that are there."""
    name = meta.architecture
    variants = (kind for of, kind, is_it in _VARIANTS if of == name and is_it(meta))
    if (variant := next(variants, None)) is not None:
        name = f"{name} ({variant})"
    if name not in ARCHITECTURES:
        known = ", ".join(dict.fromkeys(each.partition(" ")[0] for each in ARCHITECTURES))
        raise UnsupportedModel(
            f"{meta.where}: general.architecture is {meta.architecture!r}, expected one of {known}; a checkpoint in "
            "Hugging Face layout of such a model may be read"
        )
    return ARCHITECTURES[name]


def _states(**own: Any) -> Make:
    """Make a config that has these keys beyond the common ones, whatever the file says."""
    return lambda meta, base: own


_with_states = partial(Architecture, has_states=True)


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", configs.common, is_permuted=True),
    "llama (experts)": Architecture(
        "MixtralForCausalLM", configs.turned_whole(configs.mixture), names.MIXTRAL, is_permuted=True
    ),
    "arcee": Architecture("ArceeForCausalLM", _states(hidden_act="relu2"), is_permuted=True),
    "bailingmoe": Architecture("DeepseekForCausalLM", configs.deepseek_moe, is_permuted=True),
    "bailingmoe2": Architecture("BailingMoeV2ForCausalLM", configs.ling, names.LING),
    "deci": Architecture("DeciLMForCausalLM", configs.deci, is_permuted=True, may_vary=True),
    "deepseek": Architecture("DeepseekForCausalLM", configs.deepseek_moe, is_permuted=True),
    "dots1": Architecture("Dots1ForCausalLM", configs.glm4moe),
    "exaone": Architecture("LlamaForCausalLM", configs.common),
    "bitnet": Architecture("BitNetForCausalLM", _states(hidden_act="silu"), names.BITNET),
    "internlm2": Architecture("LlamaForCausalLM", configs.common, is_permuted=True),
    "minicpm": Architecture("GraniteForCausalLM", configs.minicpm, is_permuted=True),
    "orion": Architecture("OrionForCausalLM", configs.partial),
    "olmo": Architecture("OlmoForCausalLM", configs.olmo, is_permuted=True),
    "phimoe": Architecture("PhimoeForCausalLM", configs.phimoe, names.MIXTRAL),
    "qwen2": Architecture("Qwen2ForCausalLM", configs.common),
    "qwen2vl": Architecture("Qwen2ForCausalLM", configs.sections),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", configs.turned_whole(configs.qwen2moe)),
    "qwen3": Architecture("Qwen3ForCausalLM", configs.common, apart=encoders.JUDGE),
    "qwen3vl": Architecture("Qwen3ForCausalLM", configs.sections, apart=encoders.JUDGE),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", configs.sections_moe),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", configs.turned_whole(configs.qwen3moe)),
    "gemma": Architecture("GemmaForCausalLM", _states(**configs.GEMMA), shift=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", configs.gemma2, shift=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", configs.gemma3, shift=1.0),
    "gemma3n": Architecture("Gemma3nForCausalLM", configs.gemma3n, names.GEMMA3N, tops=names.GEMMA3N_TOPS),
    "phi3": Architecture("Phi3ForCausalLM", configs.phi3, names.FUSED),
    "granite": Architecture("GraniteForCausalLM", configs.granite, is_permuted=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", configs.granite_moe, names.GRANITE, is_permuted=True),
    "granitemoe (shared)": Architecture(
        "GraniteMoeSharedForCausalLM", configs.granite_moe, names.GRANITE, is_permuted=True
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", configs.common),
    "olmo2 (windows)": Architecture("Olmo3ForCausalLM", configs.common),
    "olmoe": Architecture("OlmoeForCausalLM", configs.turned_whole(configs.mixture)),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", configs.deepseek, names.LATENT),
    "deepseek2 (sigmoid)": Architecture("DeepseekV3ForCausalLM", configs.deepseek, names.LATENT),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", mixtures.glm_dsa, names.GLM_DSA),
    "gpt-oss": Architecture("GptOssForCausalLM", configs.gpt_oss, names.GPT_OSS),
    "starcoder2": Architecture("Starcoder2ForCausalLM", configs.starcoder2),
    "stablelm": Architecture("StableLmForCausalLM", configs.stablelm),
    "glm4": Architecture("Glm4ForCausalLM", configs.partial, names.FUSED),
    "glm4moe": Architecture("Glm4MoeForCausalLM", configs.glm4moe, names.MLP_NORM),
    "smollm3": Architecture("SmolLM3ForCausalLM", configs.common, is_permuted=True),
    "mistral3": Architecture("Ministral3ForCausalLM", configs.mistral3, is_permuted=True),
    "command-r": Architecture("CohereForCausalLM", configs.cohere),
    "cohere2": Architecture("Cohere2ForCausalLM", configs.cohere),
    "exaone4": Architecture("Exaone4ForCausalLM", configs.common),
    "seed_oss": Architecture("SeedOssForCausalLM", configs.common, names.MLP_NORM),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", configs.ernie),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", configs.common),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", configs.hunyuan_moe),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", configs.minimax, names.MINIMAX),
    "mamba": Architecture("MambaForCausalLM", hybrids.mamba, names.MAMBA, has_states=True),
    "mamba (norms)": Architecture("FalconMambaForCausalLM", hybrids.mamba, names.MAMBA, has_states=True),
    "jamba": Architecture("JambaForCausalLM", hybrids.jamba, names.JAMBA, has_states=True),
    "nemotron": Architecture("NemotronForCausalLM", configs.plus(configs.partial, hidden_act="relu2"), shift=1.0),
    "gemma4": Architecture("Gemma4ForCausalLM", configs.gemma4, names.GEMMA4, tops=names.GEMMA3N_TOPS, may_vary=True),
    "llama4": Architecture("Llama4ForCausalLM", configs.llama4),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", configs.ernie_moe, names.ERNIE_MOE),
    "apertus": Architecture("ApertusForCausalLM", _states(hidden_act="xielu"), numbers=names.APERTUS_NUMBERS),
    "falcon": Architecture("FalconForCausalLM", configs.falcon, names.GROUPED, rows=orders.falcon),
    "falcon (norms)": Architecture("FalconForCausalLM", configs.falcon, names.FALCON_NORMS, rows=orders.falcon),
    "gpt2": Architecture("GPTBigCodeForCausalLM", layer_norms.gpt2, rows=orders.per_head),
    "starcoder": Architecture("GPTBigCodeForCausalLM", layer_norms.gpt2),
    "gptneox": Architecture("GPTNeoXForCausalLM", layer_norms.gpt_neox, names.GROUPED, rows=orders.per_head),
    "bloom": Architecture("BloomForCausalLM", layer_norms.bloom, names.GROUPED, rows=orders.per_head),
    "mpt": Architecture("MptForCausalLM", layer_norms.mpt, names.MPT),
    "phi2": Architecture("PhiForCausalLM", layer_norms.phi),
    "jais2": Architecture("Jais2ForCausalLM", _states(hidden_act="relu2")),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", configs.minicpm3, names.LATENT),
    "afmoe": Architecture("AfmoeForCausalLM", mixtures.afmoe, names.AFMOE),
    "exaone-moe": Architecture("ExaoneMoeForCausalLM", mixtures.exaone_moe, names.EXAONE_MOE),
    "hy_v3": Architecture("HYV3ForCausalLM", mixtures.hy_v3, names.EXPERT_BIAS),
    "mimo2": Architecture("MiMoV2FlashForCausalLM", mixtures.mimo2, names.SINKS, may_vary=True),
    "step35": Architecture("Step3p5ForCausalLM", mixtures.step35, names.STEP35, shift=1.0, may_vary=True),
    "mistral4": Architecture("Mistral4ForCausalLM", mixtures.mistral4, names.MISTRAL4),
    "cohere2moe": Architecture("Cohere2MoeForCausalLM", mixtures.cohere2moe),
    "granite_swa": Architecture("GraniteSWAForCausalLM", mixtures.granite_swa, names.GRANITE_SWA, is_permuted=True),
    "dbrx": Architecture("DbrxForCausalLM", mixtures.dbrx, names.DBRX),
    "chatglm": Architecture("GlmForCausalLM", configs.chatglm, names.CHATGLM, rows=orders.chatglm),
    "mellum": Architecture("MellumForCausalLM", mixtures.mellum),
    "bert": Architecture("BertModel", encoders.bert, names.BERT),
    "bert (distilled)": Architecture("DistilBertModel", encoders.distil_bert, names.DISTIL_BERT),
    "bert (joined)": Architecture("XLMRobertaModel", encoders.joined_bert, names.ENCODER),
    "jina-bert-v2": Architecture("JinaBertModel", encoders.jina_bert, names.JINA_BERT),
    "jina-bert-v2 (halves)": Architecture("JinaBertModel", encoders.jina_bert, names.JINA_BERT_HALVES),
    "jina-bert-v3": Architecture("JinaEmbeddingsV3Model", encoders.jina_embeddings_v3, names.ENCODER),
    "nomic-bert": Architecture("NomicBertModel", encoders.nomic, names.ENCODER),
    "nomic-bert-moe": Architecture("NomicBertModel", encoders.nomic_moe, names.NOMIC_MOE),
    "modern-bert": Architecture("ModernBertModel", encoders.modern_bert, names.FUSED),
    "gemma-embedding": Architecture("Gemma3TextModel", encoders.gemma_embedding, shift=1.0, apart=encoders.DENSE),
    "eurobert": Architecture("EuroBertModel", _states(model_type="eurobert")),
    "llama-embed": Architecture("LlamaBidirectionalModel", _states(model_type="llama_bidirec"), is_permuted=True),
    "mamba2": _with_states("Mamba2ForCausalLM", hybrids.mamba2, names.MAMBA2),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        _with_states("NemotronHForCausalLM", hybrids.nemotron_h, names.NEMOTRON_H, is_permuted=True),
    ),
    "falcon-h1": _with_states("FalconH1ForCausalLM", hybrids.falcon_h1, names.FALCON_H1),
    "kimi-linear": _with_states("KimiLinearForCausalLM", hybrids.kimi_linear, names.KIMI_LINEAR),
    "granitehybrid": _with_states(
        "GraniteMoeHybridForCausalLM", hybrids.granite_hybrid, names.GRANITE_HYBRID, is_permuted=True
    ),
    "granitehybrid (rotated)": _with_states(
        "BambaForCausalLM", hybrids.granite_hybrid, names.MAMBA_BESIDE, is_permuted=True
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2moe"), _with_states("Lfm2ForCausalLM", hybrids.lfm2, names.LFM2, tops=names.LFM2_TOPS)
    ),
    **{
        name: _with_states(f"Qwen3_5{kind}ForCausalLM", hybrids.qwen35, names.QWEN35, shift=1.0, rows=rows)
        for name, kind, rows in (
            ("qwen35", "", orders.qwen35),
            ("qwen35moe", "Moe", orders.qwen35),
            ("qwen3next", "Moe", orders.qwen3next),
        )
    },
}
"""The architectures by `general.architecture`; a word in parentheses distinguishes families with the same one."""
