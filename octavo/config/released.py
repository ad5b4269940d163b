"""Configs of releases whose code stands beside their weights, in the layout of transformers' classes for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.released_ernie import ERNIE_VL, ernie_layout
from octavo.config.released_intern import INTERN, intern_layout
from octavo.config.released_kimi import RELEASED, kimi_layout
from octavo.config.released_minicpm import MINICPM_V, minicpm_layout
from octavo.config.released_names import with_todays_names
from octavo.config.released_nemotron import NEMOTRON_OMNI, NEMOTRON_V2, nemotron_layout
from octavo.config.released_ovis import OVIS, ovis_layout
from octavo.config.released_pages import NEMOTRON_PAGES, pages_layout
from octavo.config.released_phi3 import PHI3V, phi3v_layout
from octavo.config.released_phi4 import PHI4, phi4_layout
from octavo.config.released_phi4 import RELEASED as PHI4_RELEASED
from octavo.config.released_retrieval import RETRIEVERS, retrieval_layout
from octavo.config.section import Section
from octavo.config.task_adapters import JINA5, jina5_layout
from octavo.errors import UnsupportedModel

_QWEN2: Final[Mapping[str, Any]] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1_000_000.0,
}
"""The second encoder of DeepSeek-OCR 2, of which its config states the width alone."""
_SEPARATED: Final = {"sam_vit_b": "sam_config", "clip-l-14-224": "encoder_config"}
"""Names of the encoders of DeepSeek-OCR, with those that transformers has."""
_INTERN_S2: Final = "InternS2PreviewForConditionalGeneration"
"""Which is Qwen3.5 with an encoder of series of numbers, which are not read."""
_NEMOTRON: Final = (*NEMOTRON_OMNI, NEMOTRON_V2)
"""Architectures of Nemotron that read images, whose text models are in `llm_config`."""
_ULTRAVOX: Final = "UltravoxModel"
_LABELS: Final = "ForSequenceClassification"
_OF_CODE: Final = frozenset({"architectures", "auto_map", "projector_config", "vision_config"})


def in_todays_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config as transformers' class has it. `where` is the file for messages.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    config = with_todays_names(config, where)
    names = config.get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    only = first if isinstance(names, list) and len(names) == 1 else ""
    if config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi":
        return {**config, "model_type": "jina_bert", "position_embedding_type": None}
    if config.get("model_type") == "xlm-roberta" and config.get("position_embedding_type") == "rotary":
        own = {"architectures": [first.replace("XLMRoberta", "JinaEmbeddingsV3")]} if first else {}
        return {**config, **own, "model_type": "jina_embeddings_v3", "position_embedding_type": None}
    if first.endswith(_LABELS) and config.get("classifier_from_token") is not None:
        ending = "ForConditionalGeneration" if "vision_config" in config else "ForCausalLM"
        return in_todays_layout({**config, "architectures": [first.removesuffix(_LABELS) + ending]}, where)
    if only in RETRIEVERS:
        return retrieval_layout(config, where)
    if only == _ULTRAVOX and config.get("text_model_id"):
        raise _without_text_model(Section(config, where))
    if only == JINA5:
        return jina5_layout(config)
    if only == _INTERN_S2:
        text = Section(config, where).part("text_config").values
        names = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
        return {**config, **names, "text_config": {**text, "model_type": "qwen3_5_moe_text"}}
    if first in INTERN and "llm_config" in config:
        return intern_layout(config, where)
    if only in _NEMOTRON and isinstance(config.get("llm_config"), Mapping):
        return nemotron_layout(config, where)
    if only in RELEASED:
        return kimi_layout(config, where)
    if only == ERNIE_VL and "im_patch_id" in config:
        return ernie_layout(config, where)
    if only in MINICPM_V:
        return minicpm_layout(config, where)
    if only in OVIS and "vision_config" not in config:
        return ovis_layout(config, where)
    if only in NEMOTRON_PAGES and "image_seq_length" not in config:
        return pages_layout(config, where)
    if only == PHI3V:
        return phi3v_layout(config, where)
    if only in (PHI4, PHI4_RELEASED):
        return phi4_layout(config, where)
    if only in ("DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM") and "language_config" in config:
        return _deepseek_ocr(config, where, is_second=only == "DeepseekOCR2ForCausalLM")
    return config


def _without_text_model(config: Section) -> UnsupportedModel:
    """Return the refusal of Ultravox, whose releases have the weights of an encoder and of a projector alone."""
    text = config.str("text_model_id")
    return UnsupportedModel(
        f"{config.where}: {_ULTRAVOX} is an encoder of sounds for {text}, whose weights are in that repository, and "
        f"octavo does not join the two; serve {text} for texts, and for sounds a model with all its weights, "
        "such as mistralai/Voxtral-Mini-3B-2507 or openbmb/MiniCPM-o-2_6"
    )


def _deepseek_ocr(config: Mapping[str, Any], where: str, *, is_second: bool) -> Mapping[str, Any]:
    """Return the config of DeepSeek-OCR, or of its second version."""
    section = Section(config, where)
    section.expect("use_mla", False, default=False)
    inner = section.section("language_config") or section
    dense, layers = inner.int("first_k_dense_replace", 0), range(inner.positive("num_hidden_layers"))
    kinds = {
        "layer_types": ["full_attention" for _ in layers],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in layers],
    }
    around = {name: value for name, value in config.items() if name not in ("auto_map", "language_config")}
    own = {name: value for name, value in inner.values.items() if name not in _OF_CODE}
    vision: Mapping[str, Any] = {"encoder_config": dict(_QWEN2), "sam_config": {"downsample_channels": [512, 896]}}
    return {
        **around,
        "architectures": ["DeepseekOcr2ForConditionalGeneration"] if is_second else config["architectures"],
        "image_token_id": section.positive("image_token_id", 128815),
        "model_type": "deepseek_ocr2" if is_second else "deepseek_ocr",
        "text_config": {**own, **kinds, "model_type": "deepseek_ocr2_text" if is_second else "unlimited_ocr_text"},
        "vision_config": vision if is_second else _encoders(section),
    }


def _encoders(section: Section) -> dict[str, Any]:
    """Return the sizes of both encoders of DeepSeek-OCR."""
    vision = section.section("vision_config")
    widths = vision.section("width") if vision else None
    found: dict[str, Any] = {}
    for name, own in _SEPARATED.items():
        sizes = widths.section(name) if widths else None
        if sizes is None:
            raise section.error("vision_config", f"the sizes of {name} in its width")
        width = sizes.positive("width")
        found[own] = {
            "hidden_size": width,
            "num_attention_heads": sizes.positive("heads"),
            "num_hidden_layers": sizes.positive("layers"),
            ("mlp_dim" if own == "sam_config" else "intermediate_size"): 4 * width,
            **{key: value for key, value in sizes.values.items() if key not in ("heads", "layers", "width")},
        }
    return found
