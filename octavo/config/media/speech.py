"""What a checkpoint's generation_config.json says about the tokens of speech."""

from __future__ import annotations

from typing import Any

from octavo.config.checkpoint import GENERATION_CONFIG, Checkpoint
from octavo.config.section import Section
from octavo.core.speech import SpeechTokens


def read_speech(checkpoint: Checkpoint) -> SpeechTokens | None:
    """Return the tokens of a model that writes down speech; None for another. Raises CheckpointError."""
    if checkpoint.values.get("model_type") != "whisper" or "no_timestamps_token_id" not in checkpoint.generation_config:
        return None
    section = Section(checkpoint.generation_config, str(checkpoint.path / GENERATION_CONFIG))
    most = checkpoint.positive("vocab_size")

    def checked(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
            raise section.error(name, f"token ids from 0 to {most - 1}")
        return value

    def one(name: str, default: Any) -> int:
        found = section.values.get(name)
        return checked(name, default if found is None else found)

    def several(name: str) -> tuple[int, ...]:
        found = section.values.get(name) or []
        if not isinstance(found, list):
            raise section.error(name, "a list of token ids")
        return tuple(checked(name, each) for each in found if each != -1)

    def named(name: str) -> dict[str, int]:
        found = section.values.get(name) or {}
        if not isinstance(found, dict):
            raise section.error(name, "an object with a token id for each name")
        return {key.strip("<|>"): checked(name, value) for key, value in found.items()}

    languages, tasks = named("lang_to_id"), named("task_to_id")
    if languages and not tasks.keys() >= {"transcribe", "translate"}:
        raise section.error("task_to_id", "the tokens of transcribe and translate")
    previous, latest = section.values.get("prev_sot_token_id"), section.values.get("max_initial_timestamp_index", 50)
    return SpeechTokens(
        start=one("decoder_start_token_id", checkpoint.values.get("decoder_start_token_id")),
        end=(checkpoint.eos_token_ids() or (checked("eos_token_id", None),))[0],
        no_timestamps=one("no_timestamps_token_id", None),
        languages=languages,
        tasks=tasks if languages else {},
        previous=None if previous is None else checked("prev_sot_token_id", previous),
        suppressed=several("suppress_tokens"),
        suppressed_first=several("begin_suppress_tokens"),
        max_initial=latest if isinstance(latest, int) and latest >= 0 else None,
    )
