"""Nemotron 3 Omni and Nemotron Nano 2 VL: what NVIDIA released, in the layout of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

NEMOTRON_OMNI: Final = tuple(f"NemotronH_{size}Omni_Reasoning_V3" for size in ("Nano_", "Super_", ""))
"""The architectures of the releases, and transformers' name of them."""
NEMOTRON_IMAGES: Final = "NemotronH_Omni_Reasoning_V3ImageProcessor"
NEMOTRON_V2: Final = "NemotronH_Nano_VL_V2"
"""Nemotron Nano 2 VL, whose images become tiles."""
NEMOTRON_SQUARES: Final = "NemotronNanoVLV2ImageProcessor"
_RADIO_SIZES: Final = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}
"""Width, layers and heads of RADIO by the name of the model that it was made from."""
_STATED: Final = frozenset({"image_processor_type", "max_num_patches", "norm_mean", "patch_size"})


def nemotron_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an image processor by transformers' names; those of something else as they are."""
    if not values.keys() & _STATED:
        return dict(values)
    numbers = {f"image_{name}": values.get(f"norm_{name}") for name in ("mean", "std")}
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {**stated, **values, "image_processor_type": NEMOTRON_IMAGES}


def nemotron_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release as transformers has it. Raises CheckpointError."""
    config = {"text_config": config["llm_config"], **{name: config[name] for name in config if name != "llm_config"}}
    if isinstance(config.get("architectures"), list) and config["architectures"] == [NEMOTRON_V2]:
        return _with_radio(config, where)
    sounds = Section(config, where).section("sound_config")
    if sounds is None:
        return config
    own = {name: value for name, value in sounds.values.items() if name != "model_type"}  # which transformers lacks
    return {**{name: config[name] for name in config if name != "sound_config"}, "audio_config": own}


def _with_radio(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config of Nemotron Nano 2 VL with the sizes of its encoder; as it is where the encoder is another one,
    or reads images of any size, so that the text model alone is served."""
    vision = Section(config, where).part("vision_config")
    args = vision.part("args")
    sizes = _RADIO_SIZES.get(str(args.values.get("model")))
    is_other = any(args.values.get(name) for name in ("min_num_patches", "cpe_num_registers", "qk_normalization"))
    if sizes is None or is_other:
        return config
    teachers = args.values.get("teachers")
    names = {str(each.get("name")) for each in teachers or () if isinstance(each, Mapping)}
    num_cls = max(1, len(names)) if args.bool("cls_token_per_teacher", False) else 1
    multiple = args.optional_positive("register_multiple")
    own = {
        **dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), sizes, strict=True)),
        "max_img_size": args.positive("cpe_max_size", 2048),
        "model_type": "radio",
        "num_cls_tokens": num_cls,
        "num_registers": multiple - num_cls % multiple if multiple else 0,
        "patch_size": vision.positive("patch_size", 16),
        "video_temporal_patch_size": 2,
    }
    return {**config, "video_temporal_patch_size": 2, "vision_config": own}


def squares_settings(config: Section, processor: Section) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of Nemotron Nano 2 VL; None where its encoder is not read.

    processor: what preprocessor_config.json has. Raises CheckpointError or UnsupportedModel.
    """
    vision = config.part("vision_config")
    if vision.values.get("num_cls_tokens") is None:
        return None
    config.expect("use_thumbnail", True, default=True)
    side, two = config.positive("force_image_size", 512), 2 * vision.positive("patch_size", 16)
    if side % two:
        raise config.error("force_image_size", f"a multiple of two patches, {two} pixels")
    numbers = {
        f"image_{each}": config.values[f"norm_{each}"] for each in ("mean", "std") if f"norm_{each}" in config.values
    }
    return {
        **numbers,
        "image_processor_type": NEMOTRON_SQUARES,
        "patch_size": two // 2,
        "max_num_tiles": processor.positive("max_num_tiles", 12),
        "size": {"height": side, "width": side},
    }
