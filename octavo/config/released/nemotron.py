"""Nemotron 3 Omni, Nemotron Nano 2 VL and Llama Nemotron Nano VL: what NVIDIA released, as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.config.media.encoder_sizes import checked_audio
from octavo.config.media.listeners import expect_parakeet
from octavo.config.section import Section

_RADIO_SIZES: Final = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    "vit_huge_patch16_224": (1280, 32, 16),
}
"""Width, layers and heads of RADIO by the name of the model that it was made from."""
_RADIO_MEAN: Final = [0.48145466, 0.4578275, 0.40821073]
_RADIO_STD: Final = [0.26862954, 0.26130258, 0.27577711]
_STATED: Final = frozenset({"image_processor_type", "max_num_patches", "norm_mean", "patch_size"})


def nemotron_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of an image processor by transformers' names; those of something else as they are."""
    values = settings.values
    if not values.keys() & _STATED:
        return values
    numbers = {f"image_{name}": values.get(f"norm_{name}") for name in ("mean", "std")}
    stated = {name: value for name, value in numbers.items() if value is not None}
    return {**stated, **values, "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor"}


def nemotron_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release as transformers has it. Raises CheckpointError."""
    config = _with_text(config)
    sounds = Section(config, where).section("sound_config")
    if sounds is None:
        return config
    own = {name: value for name, value in sounds.values.items() if name != "model_type"}  # which transformers lacks
    return {**{name: config[name] for name in config if name != "sound_config"}, "audio_config": own}


def _with_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config whose text model is called as in transformers."""
    if not isinstance(text := config.get("llm_config"), Mapping):
        return config
    return {"text_config": text, **{name: config[name] for name in config if name != "llm_config"}}


def nemotron_sounds(config: Section) -> Section | None:
    """Return the part of the encoder of sounds. Raises CheckpointError or UnsupportedModel."""
    section = checked_audio(config)
    if section is not None:
        expect_parakeet(section)
        section.positive("projection_hidden_size")
        section.bool("projection_bias", False)
        section.expect("projection_eps", 1e-5, default=1e-5)
    return section


def radio_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of Nemotron Nano 2 VL with the sizes of its encoder; without them where the encoder is another
    one, or reads images of any size, so that the text model alone is served. Raises CheckpointError."""
    if not isinstance(config.get("llm_config"), Mapping):
        return config
    config = _with_text(config)
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


def squares_settings(config: Section, read: Callable[[str], Section]) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of Nemotron Nano 2 VL; None where its encoder is not read.

    read: returns what a file of the checkpoint has. Raises CheckpointError or UnsupportedModel.
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
        "image_processor_type": "NemotronNanoVLV2ImageProcessor",
        "patch_size": two // 2,
        "max_num_tiles": read("preprocessor_config.json").positive("max_num_tiles", 12),
        "size": {"height": side, "width": side},
    }


def tiles_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of Llama Nemotron Nano VL as `radio_layout` does, with the number of vectors of a tile.

    Raises CheckpointError, and UnsupportedModel for values that the release does not have.
    """
    if not isinstance(config.get("llm_config"), Mapping):
        return config
    made = radio_layout(config, where)
    section = Section(made, where)
    section.expect_all(downsample_ratio=0.5, ps_version="v2")
    side, two = section.positive("force_image_size", 512), 2 * section.part("vision_config").positive("patch_size", 16)
    if side % two:
        raise section.error("force_image_size", f"a multiple of two patches, {two} pixels")
    return {**made, "force_image_size": side, "image_seq_length": (side // two) ** 2}


def tiles_settings(config: Section, read: Callable[[str], Section]) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of Llama Nemotron Nano VL; None where its encoder is not read. read,
    errors: as of `squares_settings`."""
    if config.part("vision_config").values.get("num_cls_tokens") is None:
        return None
    found, side = read("preprocessor_config.json"), config.positive("force_image_size", 512)
    found.expect("use_thumbnail", True, default=True)
    if found.positive("image_size", side) != side:
        raise found.error("image_size", f"force_image_size of config.json, which is {side}")
    return {
        "image_mean": _RADIO_MEAN,
        "image_processor_type": "LlamaNemotronVLImageProcessor",
        "image_std": _RADIO_STD,
        "max_patches": found.positive("max_num_tiles", 12),
        "size": {"height": side, "width": side},
    }
