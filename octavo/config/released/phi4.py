"""Phi-4-multimodal as Microsoft released it, whose code stands beside its weights, and as transformers has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.media.encoder_sizes import check_encoder
from octavo.config.pooling.task_adapters import FILES, FOLDER, JINA5
from octavo.config.section import Section

PHI4: Final = "Phi4MultimodalForCausalLM"
"""transformers' name of the architecture."""
RELEASED: Final = "Phi4MMForCausalLM"
ADAPTERS: Final = {"image": ("vision-lora", "vision_lora"), "audio": ("speech-lora", "speech_lora")}
"""The folders of the adapters that prompts with images, and those with sounds alone, are computed with, and the keys of
config.json that are null where there is none."""
_IMAGE_TOKEN: Final = 200_010
_AUDIO_TOKEN: Final = 200_011
_AROUND: Final = frozenset({"audio_processor", "auto_map", "embd_layer", "img_processor"})
_OF_IMAGES: Final = {
    "embedding_cls": "tune_image",
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}
_OF_SOUNDS: Final = {
    "downsample_rate": 1,
    "embedding_cls": "audio",
    "projection_cls": "mlp",
    "use_conv_downsample": False,
    "use_qformer": False,
}
_OF_ENCODER: Final = {
    "batch_norm": False,
    "bias_in_glu": True,
    "causal": True,
    "ext_pw_kernel_size": 1,
    "input_layer": "nemo_conv",
}
_AUDIO: Final = {
    "hidden_size": "attention_dim",
    "num_attention_heads": "attention_heads",
    "intermediate_size": "linear_units",
    "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
    **{
        name: name
        for name in (
            *("activation", "chunk_size", "conv_activation", "conv_glu_type", "depthwise_multiplier", "dropout_rate"),
            *("ext_pw_out_channel", "input_size", "kernel_size", "left_chunk", "num_blocks", "time_reduction"),
        )
    },
}
"""transformers' names of sizes of the encoder of sounds, and those of the release."""


def phi4_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config with the sizes of its encoders, and with the tokens that stand for an image and for a sound.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    section = Section(config, where)
    vision = section.section("vision_config")
    if vision is None:
        layer = section.part("embd_layer").part("image_embd_layer")
        layer.expect_all(**_OF_IMAGES)
        side = layer.positive("crop_size", 448)
        vision = Section({"crop_size": side, "image_size": side}, where, "vision_config.")
    audio = section.section("audio_config")
    processor = section.section("audio_processor")
    if audio is None and processor is not None:
        audio = Section(_audio(section, processor), where, "audio_config.")
    own: dict[str, Any] = {}
    if audio is not None:
        token = audio.positive("audio_token_id", section.positive("audio_token_id", _AUDIO_TOKEN))
        own = {"audio_config": dict(audio.values), "audio_token_id": token}
    return {
        **{name: value for name, value in config.items() if name not in _AROUND},
        "image_token_id": vision.positive("image_token_id", _IMAGE_TOKEN),
        "vision_config": dict(vision.values),
        **own,
    }


def _audio(section: Section, part: Section) -> dict[str, Any]:
    """Return the sizes of the encoder of sounds by transformers' names. part: `audio_processor` of the release."""
    stored = part.part("config")
    section.part("embd_layer").part("audio_embd_layer").expect_all(**_OF_SOUNDS)
    stored.expect_all(**_OF_ENCODER)
    own = {name: stored.values[old] for name, old in _AUDIO.items() if stored.values.get(old) is not None}
    convolved, bias = (stored.section(name) for name in ("nemo_conv_settings", "relative_attention_bias_args"))
    if convolved is not None:
        own["nemo_conv_channels"] = convolved.positive("conv_channels", 1024)
    if bias is not None:
        own["bias_max_distance"] = bias.positive("t5_bias_max_distance", 1000)
    return own


def adapter_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files in folders that a model with this config is served with."""
    names = config.get("architectures")
    folders = [folder for folder, _ in ADAPTERS.values()] if names in ([PHI4], [RELEASED]) else []
    if names == [JINA5]:  # of all tasks: hf_overrides choose one
        folders = [f"{FOLDER}/*"]
    return tuple(f"{folder}/{each}" for folder in folders for each in FILES)


def phi4_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of the image processor by the names of others. Raises CheckpointError."""
    if "dynamic_hd" not in settings.values:
        return settings.values
    kept = {name: value for name, value in settings.values.items() if name != "dynamic_hd"}
    return {
        **kept,
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "max_patches": settings.positive("dynamic_hd", 36),
    }


def phi4_sounds(config: Section) -> Section | None:
    """Return the part of the encoder of sounds without what is the same in all. Raises CheckpointError or
    UnsupportedModel for an encoder that transformers' class is not."""
    section = config.section("audio_config")
    if section is None:
        return None
    section.expect("chunk_size", -1, default=-1)  # no chunks
    section = Section({**section.values, "chunk_size": None}, section.where, "audio_config.")
    check_encoder(section)
    section.expect("downsample_rate", 1, default=1)
    width, joined = section.positive("hidden_size", 1024), section.positive("time_reduction", 8)
    if joined < 2 or joined & (joined - 1):
        raise section.error("time_reduction", "a power of 2")
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if section.positive(name, 1024) != width:
            raise section.error(name, f"hidden_size, which is {width}")
    return section
