"""Which checkpoints have sounds read in the place of tokens, and the part of the config with their encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo.config.checkpoint import Checkpoint, read_json_object
from octavo.config.encoder_sizes import check_encoder
from octavo.config.media_args import media_limits
from octavo.config.section import Section

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs

_GRANITE: Final = ("GraniteSpeech", "GraniteSpeechPlus")
READ_SOUND: Final = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("AudioFlamingo3", "Gemma3n", "Gemma4", "Gemma4Unified", "GlmAsr", *_GRANITE, "Qwen2Audio", "Qwen2_5Omni"),
        *("Qwen3ASR", "Qwen3OmniMoe", "Voxtral"),
    )
)
"""Architectures whose sounds are read, with transformers."""
_ADAPTER: Final = "adapter_config.json"


class OwnAdapter(NamedTuple):
    """The folder of the adapter that a checkpoint has for prompts with sounds, and the largest rank of its matrices."""

    path: Path
    rank: int


def sound_section(checkpoint: Checkpoint) -> Section | None:
    """Return what config.json says of the encoder of sounds; None for a checkpoint without one.

    Raises CheckpointError for a damaged config.
    """
    if checkpoint.architecture not in READ_SOUND:
        return None
    if _is_granite(checkpoint):
        return _granite(checkpoint.stored)
    section = checkpoint.stored.section("audio_config")
    check_encoder(section)
    return section


def _is_granite(checkpoint: Checkpoint) -> bool:
    return checkpoint.architecture.removesuffix("ForConditionalGeneration") in _GRANITE


def _granite(config: Section) -> Section:
    """Return the encoder's part with the sizes of the projector beside it. Raises CheckpointError."""
    section, projector = config.section("encoder_config"), config.section("projector_config")
    section = section or Section({}, config.where, "encoder_config.")
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


def own_adapter(checkpoint: Checkpoint) -> OwnAdapter | None:
    """Return the adapter that a checkpoint has for prompts with sounds; None for one without.

    Raises CheckpointError where it is stated and not there.
    """
    if not _is_granite(checkpoint) or not checkpoint.stored.bool("has_lora_adapter", True):
        return None
    file = checkpoint.path / _ADAPTER
    if not file.is_file():
        raise checkpoint.stored.error(
            "has_lora_adapter", f"false where {_ADAPTER} is not in the folder; download the model again"
        )
    values = read_json_object(file)
    ranks = values.get("rank_pattern")
    own = [each for each in ranks.values() if isinstance(each, int)] if isinstance(ranks, dict) else []
    return OwnAdapter(checkpoint.path, max([Section(values, str(file)).positive("r", 8), *own]))


def for_own_adapter(args: EngineArgs, checkpoint: Checkpoint) -> EngineArgs:
    """Return the arguments with room for the adapter that a checkpoint has for its sounds. Raises CheckpointError."""
    own = own_adapter(checkpoint) if media_limits(args)["audio"] else None
    return args if own is None else replace(args, enable_lora=True, max_lora_rank=max(args.max_lora_rank, own.rank))
