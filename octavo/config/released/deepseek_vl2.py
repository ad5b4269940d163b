"""DeepSeek-VL2, whose code stands beside its weights, with the config of its encoder: SigLIP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.config.released.deepseek_ocr import deepseek_text
from octavo.config.section import Section

DEEPSEEK_VL2: Final = "DeepseekVLV2ForCausalLM"
VL2_TYPE: Final = "deepseek_vl_v2"
"""The `model_type` of releases, which name no architecture."""
_RESOLUTIONS: Final = "candidate_resolutions"
_MOST_TILES: Final = 64


def deepseek_vl2_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release with its text model, and with the sizes of its encoder.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    if "language_config" not in config:
        return config
    section = Section(config, where)
    section.expect("tile_tag", "2D", default="2D")
    section.expect("global_view_pos", "head", default="head")
    inner, vision, projector = (section.part(f"{name}_config") for name in ("language", "vision", "projector"))
    width = vision.positive("width", 1024)
    vision.expect_all(class_token=False, select_layer=-1)
    projector.expect_all(projector_type="downsample_mlp_gelu", depth=2, mlp_ratio=1, downsample_ratio=2)
    projector.expect_all(token_pooling=False, input_dim=width, n_embed=inner.positive("hidden_size"))
    text = "deepseek_v3" if inner.values.get("topk_method") == "noaux_tc" else "deepseek_v2"
    if not inner.bool("use_mla", True):
        text = "deepseek"
    parts = {"auto_map", "language_config", "projector_config"}
    return {
        **{name: value for name, value in config.items() if name not in parts},
        "architectures": [DEEPSEEK_VL2],
        "text_config": deepseek_text(inner, text),
        "vision_config": {
            "hidden_size": width,
            "image_size": vision.positive("image_size", 384),
            "intermediate_size": int(width * vision.positive_float("mlp_ratio", 4.0)),
            "model_type": "siglip_vision_model",
            "num_attention_heads": vision.positive("heads", 16),
            "num_hidden_layers": vision.positive("layers", 24),
            "patch_size": vision.positive("patch_size", 16),
        },
    }


def deepseek_vl2_settings(config: Section, read: Callable[[str], Section]) -> Mapping[str, Any]:
    """Return the settings of the image processor that the code of the releases has.

    read: returns what a file of the checkpoint has. Raises CheckpointError or UnsupportedModel.
    """
    processor, vision = read("processor_config.json"), config.part("vision_config")
    side = vision.positive("image_size")
    processor.expect_all(normalize=True, downsample_ratio=2, patch_size=vision.positive("patch_size"))
    sizes = (processor if _RESOLUTIONS in processor.values else config).values.get(_RESOLUTIONS, [[side, side]])
    is_fit = isinstance(sizes, list) and sizes and all(_is_grid(each, side) for each in sizes)
    if not is_fit:
        raise processor.error(_RESOLUTIONS, f"widths and heights of up to {_MOST_TILES} squares of {side} pixels")
    named = {name: processor.values.get(name) or [0.5] * 3 for name in ("image_mean", "image_std")}
    return {"image_processor_type": "DeepseekVLV2ImageProcessor", _RESOLUTIONS: sizes, **named}


def _is_grid(size: object, side: int) -> bool:
    """Return whether something is a width and a height of whole squares, which are not too many."""
    if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
        return False
    width, height = size
    return not (width % side or height % side or width * height > _MOST_TILES * side * side)
