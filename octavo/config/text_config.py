"""One layout for `config.json`: the keys of the text model, which a model of images or sound has in `text_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.config.released.deepseek import deepseek_v4_layout
from octavo.config.released.minimax import minimax_layout
from octavo.config.released.step import step3_layout, step_layout
from octavo.config.section import Section

TEXT_CONFIG: Final = "text_config"
THINKER_CONFIG: Final = "thinker_config"

OF_THE_WHOLE: Final = frozenset(
    {"architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype"}
)
"""Keys whose value beside `text_config` counts; of the others the one within."""
NUM_UNDRAWN: Final = 8
"""Tokens that Llama 3.2 Vision has behind those of its head, that of images the first: they are read and not drawn."""
_GEMMA3: Final[Mapping[str, Any]] = {
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window_pattern": 6,
    "vocab_size": 262_208,
}
_GEMMA4: Final[Mapping[str, Any]] = {
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "sliding_window_pattern": 6,
}
_MINIMAX_M3: Final = ("minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text")
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        "hidden_size_per_layer_input": 256,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
    },
    "embedding_gemma2_text": {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {**_GEMMA4, "hidden_size_per_layer_input": 0},
    "glm4v_moe_text": {"attention_bias": True},
    "glm4v_text": {"rms_norm_eps": 1e-5},
    "glm_ocr_text": {"attention_bias": False, "rms_norm_eps": 1e-5},
    "gpt_oss": {"rope_theta": 150_000.0, "sliding_window": 128, "sliding_window_pattern": 2},
    **{
        each: {"rope_theta": 500_000.0}
        for each in (
            *("bitnet", "cohere", "ernie4_5", "ernie4_5_moe", "flex_olmo", "llama4_text", "olmo3"),
            *("ernie4_5_vl_moe_text", "paddleocr_vl", "paddleocr_vl_text"),
        )
    },
    **{
        each: {"rope_theta": 1_000_000.0} for each in ("lfm2", "lfm2_moe", "minimax", "mixtral", "phimoe", "solar_open")
    },
    "bailing_hybrid": {"rope_theta": 6_000_000.0},
    "cohere_asr": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "max_position_embeddings": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 8,
        "vocab_size": 16_384,
    },
    "cwm": {"rope_theta": 1_000_000.0},
    "exaone": {"num_key_value_heads": 8, "rope_theta": 500_000.0},
    "granite_swa": {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    # nothing in them depends on the position
    **{each: {"max_position_embeddings": 1 << 20} for each in ("falcon_mamba", "mamba", "mamba2")},
    "hy_v3": {"rope_theta": 11_158_840.0},
    **{each: {"head_dim": 128, "rms_norm_eps": 1e-5} for each in ("internlm3", "iquestcoder")},
    "helium": {"rope_theta": 100_000.0},
    **{each: {"tie_word_embeddings": True} for each in ("hunyuan_vl", "hunyuan_vl_text")},
    **{each: {"rope_theta": 10_000_000.0} for each in ("longcat_flash", "longcat_flash_ngram")},
    "mellum": {"norm_topk_prob": True},
    **{each: {"rope_theta": 5_000_000.0} for each in ("minimax_m2", *_MINIMAX_M3)},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "orion": {"partial_rotary_factor": 1.0},
    "sarvam_moe": {"rope_theta": 8_000_000.0},
    "smollm3": {"rope_theta": 2_000_000.0},
    "step3_text": {"rope_theta": 500_000.0},
}
"""By `model_type`: values that published configs leave out."""
_DEFAULTS_AROUND: Final[Mapping[str, Mapping[str, Any]]] = {
    "clip": {
        "hidden_act": "quick_gelu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "max_position_embeddings": 77,
        "num_attention_heads": 8,
        "num_hidden_layers": 12,
        "vocab_size": 49_408,
    },
    "siglip": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "vocab_size": 32_000,
    },
    "glmasr": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 59_264,
    },
    "voxtral": {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131_072,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000_000.0,
        "vocab_size": 131_072,
    },
}
"""By `model_type` of a model around a text model: values that the config of the latter may leave out."""
_MIMO_V2: Final = ("mimo_v2", "mimo_v2_flash", "mimovl")
_OF_KIMI: Final = {
    "max_position_embeddings": "model_max_length",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
}
_OF_STEP: Final = {
    "max_position_embeddings": "max_seq_len",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "num_key_value_heads": "num_attention_groups",
}
_OTHER_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "exaone": {"hidden_act": "activation_function", "num_hidden_layers": "num_layers"},
    **{each: {"rms_norm_eps": "layernorm_epsilon"} for each in _MIMO_V2},
    "inkling_text": {
        "conv_kernel_size": "sconv_kernel_size",
        "first_k_dense_replace": "dense_mlp_idx",
        "max_position_embeddings": "model_max_length",
    },
    "mlp_speculator": {"hidden_size": "emb_dim"},
    "nomic_bert": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "rope_theta": "rotary_emb_base",
    },
    "orion": {"layer_norm_eps": "rms_norm_eps"},
    "bailing_hybrid": _OF_KIMI,
    "bailing_moe_v3": _OF_KIMI,
    "kimi_k3": _OF_KIMI,
    "kimi_linear": _OF_KIMI,
    "step3p5": _OF_STEP,
    "step3_text": _OF_STEP | {"max_position_embeddings": "max_position_embedding"},
}
"""By `model_type`: keys that have another name in the configs of such models."""
_TIED_AROUND: Final = (
    "cohere2_vision",
    "fun_asr_nano",
    "glmasr",
    "granite_speech",
    "granite_speech_plus",
    "lfm2_vl",
    "moss_transcribe_diarize",
    "qwen3_asr",
)
"""Types of models whose heads are their embeddings, unless the whole config says otherwise."""
_LOOSE_AROUND: Final = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Types of models whose whole config alone says whether they are: the default of the text model's config is wrong."""
_OF_SOUNDS: Final = {
    "musicflamingo": ("head_dim", "max_position_embeddings", "partial_rotary_factor", "rope_parameters"),
}
"""By `model_type`: keys beside `text_config` that are about the rotations of sounds."""
_STRETCHED: Final = frozenset(
    {
        *("apertus", "apertus1p5", "apertus1p5_text", "cwm", "gpt_oss", "lfm3", "ministral3", "mistral4"),
        *("openai_privacy_filter", "mistral_large4", "mistral_large4_text"),
    }
)
"""Types of models whose rotations are not plain by default; every published config states them."""


def of_thinker(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """Return the config of what writes text in a model that speaks too, and what stands before its keys in the file.

    Of another model the config is returned as it is. Raises CheckpointError where `thinker_config` is no object.
    """
    thinker = Section(config, where).section(THINKER_CONFIG)
    if thinker is None:
        return config, ""
    values = {**thinker.values, **{name: config[name] for name in OF_THE_WHOLE if config.get(name) is not None}}
    if values.get("architectures") == ["Qwen2_5OmniModel"]:  # as the released checkpoints have it
        values["architectures"] = ["Qwen2_5OmniForConditionalGeneration"]
    if config.get("model_type") == "qwen3_asr":  # whose parts have other names in transformers
        parts = {TEXT_CONFIG: "qwen3", "audio_config": "qwen3_asr_encoder"}
        for name, model_type in parts.items():
            if (part := thinker.section(name)) is not None:
                values[name] = {**part.values, "model_type": model_type}
                values.setdefault("tie_word_embeddings", bool(part.values.get("tie_word_embeddings")))
        values["model_type"] = "qwen3_asr"
    return values, f"{THINKER_CONFIG}."


def flattened(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a text model with all keys on one level, in the layout of today.

    `where` is the file for messages. Raises CheckpointError where `text_config` is no object.
    """
    text = Section(config, where).part(TEXT_CONFIG).values
    own = _OF_SOUNDS.get(str(config.get("model_type")), ())
    config = {name: value for name, value in config.items() if name not in own}
    of_whole = {name for name in OF_THE_WHOLE if config.get(name) is not None}
    values = {**config, **{name: value for name, value in text.items() if value is not None and name not in of_whole}}
    around, model_type = (str(each.get("model_type")) for each in (config, values))
    if around == "paligemma":  # true there of prompts alone
        values.pop("use_bidirectional_attention", None)
    # where one of the two states it, head and embedding are one
    if config.get("tie_word_embeddings", around in _TIED_AROUND) is True:
        values["tie_word_embeddings"] = True
    elif around in _LOOSE_AROUND:
        values["tie_word_embeddings"] = False
    stated = any(values.get(name) is not None for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    if not stated and model_type in _STRETCHED:
        raise Section(values, where).error("rope_parameters", f"the rotary parameters, which {model_type} states")
    values = _filled(values, {**_DEFAULTS_AROUND.get(around, {}), **_DEFAULTS.get(model_type, {})})
    others = _OTHER_NAMES.get(model_type, {})
    values = _filled(values, {name: values[other] for name, other in others.items() if other in values})
    if model_type in _CHANGES:
        values |= _CHANGES[model_type](values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), Mapping):
            values[name] = _of_text(values[name])
    return values


def _filled(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with defaults for those that are absent or null."""
    return {**values, **{name: value for name, value in defaults.items() if values.get(name) is None}}


def _gemma3_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of both kinds of layers; older configs stretch those without a window alone."""
    if values.get("rope_parameters") is not None:
        return {}
    theta, local, scaling = (values.get(name) for name in ("rope_theta", "rope_local_base_freq", "rope_scaling"))
    full = {"rope_theta": 1_000_000.0 if theta is None else theta}
    if isinstance(scaling, Mapping):
        full.update(scaling)
    windowed = {"rope_theta": 10_000.0 if local is None else local}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}


def _trained_positions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positions of the training as the longest text: beyond them, rotations change."""
    trained = values.get("max_trained_positions")
    return {} if trained is None else {"n_positions": trained}


def _undrawn_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vocabulary with the tokens that have embeddings and no logits."""
    size = values.get("vocab_size")
    return {"vocab_size": size + NUM_UNDRAWN} if isinstance(size, int) else {}


def _added_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vocabulary of Molmo 2 with the tokens behind those of its head."""
    size, added = values.get("vocab_size"), values.get("additional_vocab_size", 128)
    return {"vocab_size": size + added} if isinstance(size, int) and isinstance(added, int) else {}


def _whole_turns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters without the share of a head that turns, which the sizes of heads state."""
    made: dict[str, Any] = {"partial_rotary_factor": None}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), Mapping):
            made[name] = {**values[name], "partial_rotary_factor": None}
    return made


def _mimo_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kinds of layers, which the release states by numbers, and the window with the query itself."""
    made: dict[str, Any] = {}
    for name, older, kinds in (
        ("layer_types", "hybrid_layer_pattern", ("full_attention", "sliding_attention")),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        if values.get(name) is None and isinstance(values.get(older), list):
            made[name] = [kinds[bool(each)] for each in values[older]]
    size = values.get("sliding_window_size")
    return made | ({"sliding_window": size + 1} if isinstance(size, int) else {})


_CHANGES: Final[Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]] = {
    "bailing_moe_v3": _whole_turns,
    "deepseek_v4": deepseek_v4_layout,
    "gemma3_text": _gemma3_rope,
    "gemma3n_text": _gemma3_rope,
    **dict.fromkeys(_MIMO_V2, _mimo_layers),
    **dict.fromkeys(_MINIMAX_M3, minimax_layout),
    "mllama_text_model": _undrawn_tokens,
    "molmo2_text": _added_tokens,
    "nomic_bert": _trained_positions,
    "step3_text": step3_layout,
    "step3p5": step_layout,
}
"""By `model_type`: makes keys of today from those of a config."""


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters for text, whose tokens have one position in all sections (`mrope`, `xdrope`)."""
    plain = {"mrope": "default", "xdrope": "dynamic"}
    return {
        name: plain.get(str(value), value) if name in ("type", "rope_type") else value for name, value in rope.items()
    }
