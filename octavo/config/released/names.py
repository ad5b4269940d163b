"""Configs of releases that differ from transformers' class, or from the family of octavo, in names of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

SAME: Final = {
    "AquilaModel": ("AquilaForCausalLM", "aquila"),
    "BaiChuanForCausalLM": ("BaichuanForCausalLM", "baichuan"),
    "BgeM3EmbeddingModel": ("XLMRobertaModel", "xlm-roberta"),
    "ChatGLMForConditionalGeneration": ("ChatGLMForCausalLM", "chatglm"),
    "ChatGLMModel": ("ChatGLMForCausalLM", "chatglm"),
    "HCXVisionV2ForCausalLM": ("HyperCLOVAXVisionV2ForConditionalGeneration", "hyperclovax_vision_v2"),
    "InternS1ForConditionalGeneration": ("InternVLForConditionalGeneration", "internvl"),
    "LightOnOCRForConditionalGeneration": ("LightOnOcrForConditionalGeneration", "lighton_ocr"),
    "Qwen3ASRForcedAlignerForTokenClassification": ("Qwen3ASRForConditionalGeneration", "qwen3_asr"),
    "Qwen3ASRRealtimeGeneration": ("Qwen3ASRForConditionalGeneration", "qwen3_asr"),
    "RWForCausalLM": ("FalconForCausalLM", "falcon"),
    "StableLMEpochForCausalLM": ("StableLmForCausalLM", "stablelm"),
    "TeleChat2ForCausalLM": ("TeleChatForCausalLM", "telechat"),
}
"""Architectures of releases, with other names of the same, and of their `model_type`."""
_GPT2: Final = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_MPT: Final = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "bloom": {**_GPT2, "seq_length": "max_position_embeddings"},
    "chatglm": {
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "padded_vocab_size": "vocab_size",
        "seq_length": "max_position_embeddings",
    },
    "dbrx": {**_MPT, "kv_n_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"},
    "distilbert": {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    },
    "falcon": {**_GPT2, "n_head_kv": "num_kv_heads"},
    "mpt": _MPT,
    "plamo3": {"window_size": "sliding_window"},
    "qwen": {"kv_channels": "head_dim", "seq_length": "max_position_embeddings"},
    "stablelm": {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
    "telechat": {
        **_GPT2,
        "ffn_hidden_size": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "training_seqlen": "max_position_embeddings",
    },
}
"""Names of keys by `model_type`, with those that octavo reads."""
_OF_FALCON: Final = ("RefinedWeb", "RefinedWebModel")
_NO_COUNTS: Final = ("activation", "norm_eps", "rope_pct")
_OF_DBRX: Final = frozenset(
    {"clip_qkv", "ffn_hidden_size", "kv_n_heads", "moe_normalize_expert_weights", "moe_num_experts", "moe_top_k"}
) | {"rope_theta"}
"""Keys in the sections of DBRX."""
_TRAINED: Final[Mapping[str, Any]] = {"max_position_embeddings": 2048}
_LEFT_OUT: Final[Mapping[str, Mapping[str, Any]]] = dict.fromkeys(("bloom", "dbrx", "falcon", "mpt"), _TRAINED)
"""Values of keys that releases leave out, by `model_type`."""


def with_todays_names(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config with the architecture, the `model_type` and the keys that octavo reads.

    `where` is the file for messages. Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    names, release = config.get("architectures"), config.get("model_type")
    if isinstance(names, list) and len(names) == 1 and (found := SAME.get(str(names[0]))) is not None:
        config = {**config, "architectures": [found[0]], "model_type": found[1]}
    if release in _OF_FALCON:
        # Falcon's first code, of whose models that with 40 B has groups
        own = {"multi_query": False, "parallel_attn": False, "new_decoder_architecture": "n_head_kv" in config}
        config = {**own, **config, "model_type": "falcon"}
    kind = str(config.get("model_type"))
    if kind == "baichuan" and "max_position_embeddings" not in config:
        # of all releases only those of 13B have no such key: their scores have slopes instead of rotations
        return {**config, "alibi": True, "max_position_embeddings": config.get("model_max_length")}
    if kind not in _NAMES:
        return config
    if kind == "dbrx":
        section = Section(config, where)
        parts = [part.values for name in ("attn_config", "ffn_config") if (part := section.section(name)) is not None]
        config = {**{name: part[name] for part in parts for name in _OF_DBRX & part.keys()}, **config}
    stated = Section(config, where)
    for name in _NAMES[kind]:  # complaints name the key that the file has
        if name not in _NO_COUNTS:
            stated.optional_positive(name)
    if kind == "plamo3":
        config = {**config, "rope_parameters": _plamo_ropes(stated)}
    own_names = {ours: config[name] for name, ours in _NAMES[kind].items() if name in config}
    return {**_LEFT_OUT.get(kind, {}), **config, **own_names}


def _plamo_ropes(stated: Section) -> Mapping[str, Any]:
    """Return the rotary parameters of each kind of layer of PLaMo 3. Raises CheckpointError."""
    local = {"rope_type": "default", "rope_theta": stated.positive_float("rope_local_theta", 10_000.0)}
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": stated.positive_float("rope_theta", 150_000.0)}
    factor = stated.positive_float("rope_scaling_factor", 1.0)
    if factor != 1.0:
        original = stated.positive("initial_context_length")
        full |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, "truncate": False}
    return {"full_attention": full, "sliding_attention": local}
