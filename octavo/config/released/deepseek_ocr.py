"""DeepSeek-OCR and DeepSeek-OCR 2, whose code stands beside their weights, in the layout of transformers' classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

SECOND: Final = "DeepseekOCR2ForCausalLM"
"""The architecture of the second version, which transformers calls DeepseekOcr2ForConditionalGeneration."""
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
_OF_CODE: Final = frozenset({"architectures", "auto_map", "projector_config", "vision_config"})


def deepseek_ocr_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release of DeepSeek-OCR, or of its second version, as transformers' class has it.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    if "language_config" not in config:
        return config
    is_second = config["architectures"][0] == SECOND
    section = Section(config, where)
    section.expect("use_mla", False, default=False)
    inner = section.section("language_config") or section
    around = {name: value for name, value in config.items() if name not in ("auto_map", "language_config")}
    vision: Mapping[str, Any] = {"encoder_config": dict(_QWEN2), "sam_config": {"downsample_channels": [512, 896]}}
    return {
        **around,
        "architectures": ["DeepseekOcr2ForConditionalGeneration"] if is_second else config["architectures"],
        "image_token_id": section.positive("image_token_id", 128815),
        "model_type": "deepseek_ocr2" if is_second else "deepseek_ocr",
        "text_config": deepseek_text(inner, "deepseek_ocr2_text" if is_second else "unlimited_ocr_text"),
        "vision_config": vision if is_second else _encoders(section),
    }


def deepseek_text(inner: Section, model_type: str) -> dict[str, Any]:
    """Return the config of a text model of DeepSeek with the kinds of its layers. Raises CheckpointError."""
    dense, layers = inner.int("first_k_dense_replace", 0), range(inner.positive("num_hidden_layers"))
    return {
        **{name: value for name, value in inner.values.items() if name not in _OF_CODE},
        "layer_types": ["full_attention" for _ in layers],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in layers],
        "model_type": model_type,
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
