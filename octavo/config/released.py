"""Configs of releases whose code stands beside their weights, in the layout of transformers' classes for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_QWEN2: Final[Mapping[str, Any]] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1_000_000.0,
}
"""The second encoder of DeepSeek-OCR 2, of which its config states the width alone."""
_OF_CODE: Final = frozenset({"architectures", "auto_map", "projector_config", "vision_config"})


def in_todays_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config as transformers' class has it. `where` is the file for messages.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    if config.get("architectures") != ["DeepseekOCR2ForCausalLM"]:
        return config
    section = Section(config, where)
    section.expect("use_mla", False, default=False)
    inner = section.section("language_config") or section
    dense = inner.int("first_k_dense_replace", 0)
    kinds = ["dense" if layer < dense else "sparse" for layer in range(inner.positive("num_hidden_layers"))]
    around = {name: value for name, value in config.items() if name not in ("auto_map", "language_config")}
    own = {name: value for name, value in inner.values.items() if name not in _OF_CODE}
    return {
        **around,
        "architectures": ["DeepseekOcr2ForConditionalGeneration"],
        "image_token_id": section.positive("image_token_id", 128815),
        "model_type": "deepseek_ocr2",
        "text_config": {**own, "mlp_layer_types": kinds, "model_type": "deepseek_ocr2_text"},
        "vision_config": {"encoder_config": dict(_QWEN2), "sam_config": {"downsample_channels": [512, 896]}},
    }
