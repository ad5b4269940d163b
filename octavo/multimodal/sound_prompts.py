"""From a prompt with markers and its sounds to the tokens and arrays that the workers read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.core.media import MediaInput, TypedArray, digest_of
from octavo.errors import InvalidRequest
from octavo.multimodal.families import first_positive
from octavo.multimodal.log_mel import LogMel
from octavo.multimodal.placeholders import matched, spans_of
from octavo.multimodal.sound import read_sound

FIELD = "multi_modal_data.audio"


class SoundPrompts:
    """Writes the sounds of prompts out. Safe to use from several threads."""

    kinds = frozenset({"audio"})
    """What prompts may bring."""

    def __init__(self, checkpoint: Checkpoint, section: Section, limits: Mapping[str, int]) -> None:
        """section: of the encoder in config.json. limits: sounds of one prompt. Raises CheckpointError."""
        config = Section(checkpoint.stored, checkpoint.where)
        self._token = first_positive(config, ("audio_token_index", "audio_token_id"))
        self._limit = limits["audio"]
        self._log_mel = LogMel.of(
            checkpoint.path, {"num_mel_bins": 128, "max_source_positions": 1500} | {**section.values}
        )

    def open(self) -> None:
        """Import what reads sounds."""
        self._log_mel.features(np.zeros(0, np.float32))

    def expand(self, token_ids: Sequence[int], given: Mapping[str, Any]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt's tokens with each marker written out, and what the markers stand for.

        given: by kind, a sound or a list of them. Raises InvalidRequest.
        """
        brought = given.get("audio", [])
        if not isinstance(brought, list) or (brought and isinstance(brought[0], int | float)):
            brought = [brought]
        waiting = matched("sound", self._token, token_ids, brought, self._limit)
        written: list[int] = []
        media: list[MediaInput] = []
        for token_id in token_ids:
            if token_id == self._token:
                media.append(self._sound(next(waiting), len(written)))
                written += [token_id] * media[-1].num_embeddings
            else:
                written.append(token_id)
        return written, tuple(media)

    def _sound(self, value: Any, offset: int) -> MediaInput:
        settings = self._log_mel
        rate = settings.sampling_rate
        samples = read_sound(value, rate, FIELD, settings.seconds)
        num_frames = -(-len(samples) // settings.hop_length)
        num_vectors = ((num_frames - 1) // 2 - 1) // 2 + 1
        if num_vectors < 1:
            raise InvalidRequest(f"{FIELD} lasts {len(samples) / rate:.3f} s, expected at least 0.03 s", field=FIELD)
        window = settings.window(settings.features(samples))
        heard = TypedArray("int64", (1,), np.array([num_frames], np.int64).tobytes())
        arrays = {**window.arrays, "num_frames": heard}
        spans = tuple(spans_of([self._token] * num_vectors, self._token, offset))
        return msgspec.structs.replace(
            window, arrays=arrays, digest=digest_of(arrays), spans=spans, num_embeddings=num_vectors
        )
