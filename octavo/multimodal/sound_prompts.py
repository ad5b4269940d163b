"""From a prompt with markers and its sounds to the tokens and arrays that the workers read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import msgspec
import numpy as np

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import media_family
from octavo.config.section import Section
from octavo.core.media import MediaInput
from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.multimodal.image_writer import first_positive
from octavo.multimodal.placeholders import JoinedLines, matched, no_text
from octavo.multimodal.processors.gemma_sounds import Around
from octavo.multimodal.processors.log_mel import LogMel
from octavo.multimodal.sound import FIELD, MAX_SECONDS, read_sound, sound_input
from octavo.multimodal.sound_writers import SOUND_WRITERS, Mel

_MARKERS: Final = ("audio_token_index", "audio_token_id", "sound_context_token_id")


class SoundPrompts:
    """Writes the sounds of prompts out. Safe to use from several threads."""

    kinds = frozenset({"audio"})
    """The kinds of inputs that prompts may have."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        section: Section,
        encode: Callable[[str], list[int]],
        limits: Mapping[str, int],
        max_model_len: int,
        max_num_batched_tokens: int,
        token_text: Callable[[int], str] = no_text,
    ) -> None:
        """section: of the encoder in config.json. encode: returns the ids of a text. limits: sounds of one prompt.
        token_text: returns a token's text. Raises CheckpointError."""
        config = checkpoint.stored
        self.architecture = checkpoint.architecture
        family = SOUND_WRITERS[media_family(checkpoint.architecture).sounds]
        self.words = {} if family.words is None else {family.words.text: "audio"}
        """The text that stands for a sound in texts, where it is no token."""
        tokens = [first_positive(config, _MARKERS)] * 2 if family.words is None else family.words.ids(encode)
        self.marker, self._token = tokens
        """The token that stands for a sound before it is written out, and the token that stands for each of its
        vectors."""
        self._limit, self._token_text, self._duration = limits["audio"], token_text, family.duration
        if family.read is None:
            sizes = {"num_mel_bins": family.bands(section)}
            sizes["max_source_positions"] = section.positive("max_source_positions", 1500)
            self._log_mel: Mel = LogMel.of(checkpoint.path, sizes)
        else:
            self._log_mel = family.read(checkpoint, section)
        self._write, self._section, self._lines = family.write, section, JoinedLines(encode)
        self._knows_images = family.knows_images
        self._around = Around() if family.around is None else family.around(config, encode)
        num_windows = 1
        if family.window is not None:
            num_frames, num_vectors = family.window(section)
            self._log_mel = msgspec.structs.replace(self._log_mel, num_frames=num_frames, num_vectors=num_vectors)
            num_windows = max(1, max_model_len // num_vectors)
        self.most_s = min(family.most_s, self._log_mel.seconds * num_windows)
        """Longest sound in seconds."""
        self.piece_s = min(family.most_s, self._log_mel.seconds * max(1, int(0.7 * num_windows)))
        """Longest sound, in seconds, that leaves room in the context for its transcript."""
        self._most_vectors: int | None = None
        """Most vectors of a sound that is encoded at once: as many as a step has tokens, or those of half a minute."""
        if family.most_s < MAX_SECONDS:
            half_minute = int(30.0 / self._log_mel.seconds * self._log_mel.num_vectors)
            self._most_vectors = max(max_num_batched_tokens, half_minute)
        self.sampling_rate = self._log_mel.sampling_rate
        """Samples per second of the sounds from which spectrograms are made."""

    def open(self) -> None:
        """Import what reads sounds."""
        self._log_mel.features(np.zeros(0, np.float32))

    def timed(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the seconds of each sound where its text has a place for them. Raises
        InvalidRequest."""
        text, given = prompt.text, dict(prompt.multi_modal_data or {})
        if not self._duration or text is None or self._duration not in text or not given.get("audio"):
            return prompt
        brought, rate = given["audio"], self.sampling_rate
        brought = brought if isinstance(brought, list) and not isinstance(brought[0], int | float) else [brought]
        sounds = [read_sound(each, rate, FIELD, self.most_s) for each in brought]
        pieces = [text[start:end] for start, end in pairwise((0, *prompt.cuts, len(text)))]
        for sound in sounds:
            place = next((place for place, each in enumerate(pieces) if self._duration in each), None)
            if place is not None:
                pieces[place] = pieces[place].replace(self._duration, f"{len(sound) / rate:.2f}", 1)
        given["audio"] = [(sound, rate) for sound in sounds]
        cuts = tuple(accumulate(map(len, pieces[:-1])))
        return msgspec.structs.replace(prompt, text="".join(pieces), cuts=cuts, multi_modal_data=given)

    def expand(
        self, token_ids: Sequence[int], given: Mapping[str, Any], others: Sequence[MediaInput] = ()
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt's tokens with each marker written out, and what the markers stand for, in order.

        given: by kind, a sound or a list of them. others: what tokens of the prompt stand for already. Raises
        InvalidRequest.
        """
        brought = given.get("audio", [])
        if not isinstance(brought, list) or (brought and isinstance(brought[0], int | float)):
            brought = [brought]
        marker = self.marker, self._token_text(self.marker)
        waiting = matched("sound", marker, token_ids, brought, self._limit)
        written: list[int] = []
        media: list[MediaInput] = []
        places: list[int] = []
        is_behind = False
        for token_id in token_ids:
            places.append(len(written))
            if token_id == self.marker:
                written += self._joined(written, self._around.before)
                made = self._sound(next(waiting), has_images=bool(others))
                media += self._around.write(written, self._token, made)
            else:
                written += self._joined(written, [token_id]) if is_behind else [token_id]
            is_behind = token_id == self.marker
        for each in others:
            spans = tuple((places[offset], length) for offset, length in each.spans)
            media.append(msgspec.structs.replace(each, spans=spans))
        return written, tuple(sorted(media, key=lambda each: each.spans))

    def _joined(self, written: list[int], tokens: list[int]) -> list[int]:
        return self._lines.behind(written, tokens) if self._around.behind else tokens

    def _sound(self, value: Any, *, has_images: bool) -> list[MediaInput]:
        """Return the inputs of the encoder for a sound. Raises InvalidRequest."""
        settings = self._log_mel
        samples = read_sound(value, settings.sampling_rate, FIELD, self.most_s)
        made = []
        for each in self._write(settings, self._section, samples):
            if self._most_vectors is not None and each.num_embeddings > self._most_vectors:
                raise InvalidRequest(
                    f"{FIELD} becomes {each.num_embeddings:,} tokens, which are encoded together, expected at most "
                    f"{self._most_vectors:,}; send it in parts, or raise max_num_batched_tokens",
                    field=FIELD,
                    code="request_too_large",
                )
            if self._knows_images:
                each = sound_input({**each.arrays, "has_images": int(has_images)}, each.num_embeddings)
            made.append(each)
        return made
