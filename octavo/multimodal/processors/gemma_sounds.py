"""How Gemma 3n and Gemma 4 read sounds: transformers' spectrogram of a whole one, or its samples, and the tokens around
it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.core.media import MediaInput
from octavo.multimodal.processors.log_mel import extractor_settings, sampling_rate
from octavo.multimodal.processors.usm_mel import MOST_S, UsmMel
from octavo.multimodal.sound import Samples, sound_input, too_short


class Frames(msgspec.Struct, frozen=True):
    """The samples of a sound, `size` for a vector. seconds: how long one may be. num_vectors: of the longest one."""

    size: int
    sampling_rate: int
    seconds: float
    num_vectors: int

    def features(self, samples: Samples) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return [vectors, size], silence behind the sound included, and a 1 for each, [vectors]."""
        filled = np.pad(samples, (0, -len(samples) % self.size)).astype(np.float32, copy=False)
        made = filled.reshape(-1, self.size)
        return made, np.ones(len(made), np.int64)


class Around(NamedTuple):
    """Tokens around a sound."""

    before: list[int] = []
    """Tokens before each group."""
    end: list[int] = []
    """The last tokens that stand for the sound, where these are not its marker."""
    behind: list[int] = []
    """Tokens after each group."""
    group: int | None = None
    """Vectors in a group; None for all."""
    numbered: Callable[[int], list[int]] | None = None
    """Returns the tokens after a whole group by its number, counted from 1, in the place of `behind`."""

    def write(self, written: list[int], token: int, made: Sequence[MediaInput]) -> list[MediaInput]:
        """Return the parts of a sound with their places, and add their tokens to `written`, which already has those of
        `before` for the first part."""
        total, count, placed = sum(each.num_embeddings for each in made), 0, []
        size = self.group or total
        for each in made:
            spans, left = [], each.num_embeddings
            while left:
                if count and count % size == 0:
                    written += self.before
                length = min(left, size - count % size)
                spans.append((len(written), length))
                written += [token] * length
                left, count = left - length, count + length
                if count == total:
                    written[len(written) - len(self.end) :] = self.end
                if self.numbered is not None:
                    written += [] if count % size else self.numbered(count // size)
                elif count == total or count % size == 0:
                    written += self.behind
            placed.append(msgspec.structs.replace(each, spans=tuple(spans)))
        return placed


def _stride(section: Section) -> int:
    """Return the frames that two convolutions join. Raises CheckpointError."""
    strides = section.values.get("sscp_conv_stride_size", [[2, 2], [2, 2]])
    kinds = [isinstance(each, list) and [*map(type, each)] for each in strides] if isinstance(strides, list) else []
    if kinds != [[int, int]] * 2 or min(map(min, strides)) < 1:
        raise section.error("sscp_conv_stride_size", "two pairs of integers")
    return int(strides[0][0] * strides[1][0])


def gemma3n_mel(checkpoint: Checkpoint, section: Section) -> UsmMel:
    """Return the spectrogram of a checkpoint. section: its encoder in config.json. Raises CheckpointError."""
    num_tokens = checkpoint.stored.positive("audio_soft_tokens_per_image", 188)
    mel = UsmMel.of(
        checkpoint.path,
        "Gemma3nAudioFeatureExtractor",
        section.positive("input_feat_size", 128),
        frame_ms=32.0,
        num_vectors=num_tokens + 1,
    )
    joined = section.positive("conf_reduction_factor", 4) * _stride(section)
    hop = round(mel.sampling_rate * mel.settings["hop_length_ms"] / 1000.0)
    return msgspec.structs.replace(mel, seconds=min(mel.seconds, num_tokens * joined * hop / mel.sampling_rate))


def gemma3n_around(config: Section, encode: Callable[[str], list[int]]) -> Around:
    """Return empty lines, and the tokens that begin and end a sound, of which the latter is a vector, too. Raises
    CheckpointError."""
    lines = encode("\n\n")
    return Around([*lines, config.positive("boa_token_id")], [config.positive("eoa_token_id")], lines)


def gemma4_mel(checkpoint: Checkpoint, section: Section) -> UsmMel:
    """Return the spectrogram of a checkpoint. section: its encoder in config.json. Raises CheckpointError."""
    channels = section.values.get("subsampling_conv_channels", [128, 32])
    if not isinstance(channels, list) or len(channels) != 2:
        raise section.error("subsampling_conv_channels", "two integers")
    # the first convolution has as many as there are bands
    mel = UsmMel.of(checkpoint.path, "Gemma4AudioFeatureExtractor", channels[0], frame_ms=20.0, num_vectors=750)
    return msgspec.structs.replace(mel, num_vectors=math.ceil(mel.seconds * 250.0 / mel.settings["hop_length_ms"]))


def gemma4_frames(checkpoint: Checkpoint, section: Section) -> Frames:
    """Return how samples of a checkpoint without an encoder become vectors. section: of sounds in config.json. Raises
    CheckpointError or UnsupportedModel."""
    settings = extractor_settings(checkpoint.path)
    rate, size = sampling_rate(settings), section.positive("audio_embed_dim", 640)
    settings.expect_all(audio_samples_per_token=size, feature_size=size)
    return Frames(size, rate, MOST_S, math.ceil(MOST_S * rate / size))


def gemma4_around(config: Section, encode: Callable[[str], list[int]]) -> Around:
    """Return the tokens that begin and end a sound. Raises CheckpointError."""
    end = "eoa_token_id" if config.values.get("eoa_token_id") is not None else "eoa_token_index"
    return Around([config.positive("boa_token_id")], behind=[config.positive(end)])


def flamingo_around(config: Section, encode: Callable[[str], list[int]]) -> Around:
    """Return the tokens that begin and end a sound of Music Flamingo. Raises CheckpointError."""
    return Around(
        [config.positive("audio_bos_token_id", 151_670)], behind=[config.positive("audio_eos_token_id", 151_671)]
    )


def filled_up(settings: UsmMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound, whose vectors are as many as those of the longest one. Raises InvalidRequest."""
    return _whole(settings, samples, lambda mask: settings.num_vectors if len(mask) else 0)


def quartered(settings: UsmMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound, with a vector for each fourth frame. Raises InvalidRequest."""
    return _whole(settings, samples, lambda mask: int(mask[::4].sum()))


def each_frame(settings: Frames, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound, with a vector for each frame. Raises InvalidRequest."""
    return _whole(settings, samples, len)


def _whole(settings: UsmMel | Frames, samples: Samples, count: Callable[[NDArray[np.int64]], int]) -> list[MediaInput]:
    features, mask = settings.features(samples)
    if not (num_vectors := count(mask)):
        raise too_short(samples, settings.sampling_rate, 0.04)
    return [sound_input({"input_features": features, "input_features_mask": mask}, num_vectors)]
