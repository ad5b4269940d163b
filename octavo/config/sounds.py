"""Which checkpoints have sounds read in the place of tokens, and the part of the config with their encoder."""

from __future__ import annotations

from typing import Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.encoder_sizes import check_encoder
from octavo.config.released_minicpm import MINICPM_O
from octavo.config.released_nemotron import NEMOTRON_OMNI
from octavo.config.released_phi4 import PHI4, RELEASED
from octavo.config.section import Section

_GRANITE: Final = ("GraniteSpeech", "GraniteSpeechPlus")
PHI4_SOUNDS: Final = (PHI4, RELEASED)
_SETTINGS: Final = ("preprocessor_config.json", "processor_config.json")
READ_SOUND: Final = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *(
            "AudioFlamingo3",
            "FunAsrNano",
            "Gemma3n",
            "Gemma4",
            "Gemma4Unified",
            "GlmAsr",
            *_GRANITE,
            "MusicFlamingo",
            "Qwen2Audio",
        ),
        *("Qwen2_5Omni", "Qwen3ASR", "Qwen3OmniMoe", "Voxtral"),
    )
) | {MINICPM_O, *NEMOTRON_OMNI, *PHI4_SOUNDS}
"""Architectures whose sounds are read, with transformers."""


def sound_section(checkpoint: Checkpoint) -> Section | None:
    """Return what config.json says of the encoder of sounds; None for a checkpoint without one.

    Raises CheckpointError for a damaged config.
    """
    if checkpoint.architecture not in READ_SOUND:
        return None
    if is_granite(checkpoint):
        return _granite(checkpoint.stored)
    section = checkpoint.stored.section("audio_config")
    if section is not None and checkpoint.architecture in PHI4_SOUNDS:
        # as for images, there have to be settings beside the weights
        return _phi4(section) if any((checkpoint.path / name).is_file() for name in _SETTINGS) else None
    check_encoder(section)
    if section is not None and checkpoint.architecture == MINICPM_O:
        return _minicpm(checkpoint.stored, section)
    check_encoder(checkpoint.stored.section("adaptor_config"))
    if section is not None and checkpoint.architecture in NEMOTRON_OMNI:
        expect_parakeet(section)
        section.positive("projection_hidden_size")
        section.bool("projection_bias", False)
        section.expect("projection_eps", 1e-5, default=1e-5)
    return section


def expect_parakeet(section: Section) -> None:
    """Raise UnsupportedModel for an encoder of Parakeet's that joins another number of frames."""
    section.expect_all(subsampling_factor=8, subsampling_conv_kernel_size=3, subsampling_conv_stride=2)


def _minicpm(config: Section, section: Section) -> Section | None:
    """Return the encoder's part with what is around it; None for a checkpoint that leaves it out. Raises
    CheckpointError or UnsupportedModel."""
    if not config.bool("init_audio", True):
        return None
    width, seconds = section.positive("d_model"), config.float("audio_chunk_length", 1.0)
    if section.positive("encoder_ffn_dim") != 4 * width:
        raise section.error("encoder_ffn_dim", f"four times d_model, which is {width}")
    if not (seconds <= 0.0 or 0.02 <= seconds <= 3600.0):
        raise config.error("audio_chunk_length", "seconds from 0.02 to 3,600, or 0 for one chunk")
    own = {"audio_chunk_length": seconds, "audio_pool_step": config.positive("audio_pool_step", 2)}
    return Section({**section.values, **own}, section.where, "audio_config.")


def _phi4(section: Section) -> Section:
    """Return the encoder's part without what is the same in all. Raises CheckpointError or UnsupportedModel for an
    encoder that transformers' class is not."""
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


def is_granite(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is one of Granite Speech."""
    return checkpoint.architecture.removesuffix("ForConditionalGeneration") in _GRANITE


def _granite(config: Section) -> Section:
    """Return the encoder's part with the sizes of the projector beside it. Raises CheckpointError."""
    section, projector = config.part("encoder_config"), config.section("projector_config")
    for each in (section, projector):
        check_encoder(each)
    size, rate = config.positive("window_size", 15), config.positive("downsample_rate", 5)
    if size % rate:
        raise config.error("window_size", f"a multiple of downsample_rate, which is {rate}")
    width, read = section.positive("hidden_dim", 1024), (projector or config).positive("encoder_hidden_size", 1408)
    joined = section.values.get("cat_hidden_layers") or []
    layers = range(1 + section.positive("num_layers", 10))
    if not isinstance(joined, list) or any(type(each) is not int or each not in layers for each in joined):
        raise section.error("cat_hidden_layers", f"a list of layers, from 0 to {layers[-1]}")
    if len({*joined}) < len(joined):
        raise section.error("cat_hidden_layers", "each layer once")
    width *= 1 + len(joined)
    if projector is not None and read != width:
        raise projector.error("encoder_hidden_size", f"the width of what the encoder returns, which is {width}")
    return Section({**section.values, "window_size": size, "downsample_rate": rate}, section.where, "encoder_config.")
