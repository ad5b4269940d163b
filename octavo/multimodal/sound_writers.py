"""How families of models that read sounds in the place of tokens read one, and what is written around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import PROCESSOR_FILES
from octavo.config.section import Section, read_section
from octavo.core.media import MediaInput
from octavo.multimodal.placeholders import Words
from octavo.multimodal.processors import gemma_sounds
from octavo.multimodal.processors.gemma_sounds import Around, Frames
from octavo.multimodal.processors.levelled_sound import DURATION, LevelledSamples, levelled_sound
from octavo.multimodal.processors.levelled_sound import MOST_S as MOST_LEVELLED_S
from octavo.multimodal.processors.log_mel import LogMel
from octavo.multimodal.processors.minicpm_sounds import WORDS, minicpm_around, minicpm_window, minicpm_windows
from octavo.multimodal.processors.parakeet_mel import ParakeetMel, nemotron_around, parakeet_pieces, parakeet_window
from octavo.multimodal.processors.phi4_sounds import MOST_S, Phi4Mel, phi4_sound
from octavo.multimodal.processors.stacked_mel import StackedMel, stacked_sound
from octavo.multimodal.processors.usm_mel import UsmMel
from octavo.multimodal.sound import MAX_SECONDS, Samples, sound_input, too_short

Mel = LogMel | UsmMel | Frames | LevelledSamples | ParakeetMel | Phi4Mel | StackedMel
"""The classes that make the spectrograms or samples that an encoder reads."""


class SoundWriter(NamedTuple):
    """How a family reads a sound, and what it writes around it."""

    write: Callable[[Any, Section, Samples], list[MediaInput]]
    """Returns the inputs of the encoder for a sound, in order, without places in a prompt."""
    window: Callable[[Section], tuple[int, int]] | None = None
    """Returns the frames and the vectors of a window; None for a family that reads one window of a sound."""
    bands: Callable[[Section], int] = lambda section: section.positive("num_mel_bins", 128)
    """Returns the number of bands of a spectrogram that the encoder reads."""
    most_s: float = MAX_SECONDS
    """Seconds that are encoded at once, where windows are not encoded one by one."""
    read: Callable[[Checkpoint, Section], Mel] | None = None
    """Returns the spectrogram where it is not Whisper's."""
    around: Callable[[Section, Callable[[str], list[int]]], Around] | None = None
    """Returns the tokens around a sound."""
    knows_images: bool = False
    """The encoder gets whether the prompt has images, too."""
    duration: str = ""
    """The text in the place of the seconds of a sound; empty for none."""
    words: Words | None = None
    """The texts that stand for a sound where config.json names no token."""


def _one_window(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return a window without the vectors of the silence after the sound."""
    _check_is_heard(settings, samples)
    num_frames = -(-len(samples) // settings.hop_length)
    arrays = settings.window(settings.features(samples)).arrays
    return [sound_input({**arrays, "num_frames": num_frames}, _num_paired(num_frames))]


def _mask(size: int, num_frames: int) -> NDArray[np.int64]:
    """Return the mask of the first of so many frames."""
    return (np.arange(size) < num_frames).astype(np.int64)


def _check_is_heard(settings: LogMel, samples: Samples) -> None:
    """Raise InvalidRequest for a sound of which an encoder makes nothing."""
    if _num_paired(-(-len(samples) // settings.hop_length)) < 1:
        raise too_short(samples, settings.sampling_rate, 0.03)


def _num_paired(num_frames: int) -> int:
    """Return the vectors that a convolution with a stride of two and the mean of each two states make of frames."""
    return ((num_frames - 1) // 2 - 1) // 2 + 1


def _windows(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return as many windows as the sound begins; the encoder hears the silence behind it."""
    samples = np.pad(samples, (0, -len(samples) % (settings.num_frames * settings.hop_length)))
    features = settings.features(samples)
    return [settings.window(features, start) for start in range(0, features.shape[1], settings.num_frames)]


def _joined_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors, each made of several neighbours of the encoder's. Raises CheckpointError."""
    width, joined = section.positive("hidden_size", 1280), section.positive("intermediate_size", 5120)
    count = section.positive("max_source_positions", 1500)
    if count * width % joined:
        raise section.error("intermediate_size", f"a divisor of max_source_positions x hidden_size, {count * width:,}")
    return 2 * count, count * width // joined


def _chunked(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return as many windows as the sound begins. In them the encoder reads chunks, which do not see other windows; it
    leaves the silence behind the sound out, but hears that which fills up half a second."""
    features = settings.features(samples, _LEAST_SAMPLES // settings.hop_length)
    made = []
    for start in range(0, features.shape[1], settings.num_frames):
        window, num_frames = settings.window(features, start), min(settings.num_frames, features.shape[1] - start)
        mask = _mask(settings.num_frames, num_frames)
        made.append(sound_input({**window.arrays, "input_features_mask": mask}, _num_convolved(num_frames)))
    return made


def _chunked_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of the chunks that attend to each other. Raises CheckpointError or UnsupportedModel."""
    section.expect("n_window", _CHUNK // 2, default=_CHUNK // 2)  # transformers counts the vectors of no other
    num_frames, least = section.positive("n_window_infer", 800), _num_convolved(_CHUNK)
    if num_frames % _CHUNK or num_frames > _MOST_FRAMES:
        raise section.error("n_window_infer", f"a multiple of 2 x n_window, {_CHUNK}, of at most {_MOST_FRAMES:,}")
    for name in ("max_position_embeddings", "max_source_positions"):
        if section.positive(name, least) < least:
            raise section.error(name, f"at least the {least} of a chunk")
    return num_frames, _num_convolved(num_frames)


def _paired_chunks(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return windows of chunks that do not see each other. Silence of minutes follows a sound there, so that its last
    frames reach into it."""
    _check_is_heard(settings, samples)
    num_frames = -(-len(samples) // settings.hop_length)
    features = settings.features(np.pad(samples, (0, settings.n_fft)), 0)[:, :num_frames]
    return _cut(settings, features, 2 * section.positive("n_window", 100), _num_paired)


def _paired_chunks_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of about half a minute. Raises CheckpointError."""
    half = section.positive("n_window", 100)
    if half % 2 or half > section.positive("max_source_positions", 1500):
        raise section.error("n_window", "an even number of at most max_source_positions")
    num_frames = 2 * half * max(1, 3000 // (2 * half))
    return num_frames, _num_paired(num_frames)


def _omni_chunks(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return windows of chunks as `_chunked`, of which a sound of one chunk alone is not filled up."""
    _check_is_heard(settings, samples)
    return _cut(settings, settings.features(samples, 0), _CHUNK, _num_convolved)


def _cut(settings: LogMel, features: NDArray[np.float32], chunk: int, count: Callable[[int], int]) -> list[MediaInput]:
    """Return windows of features, filled up to whole chunks where there are several."""
    made, num_frames = [], features.shape[1]
    if num_frames > chunk:
        features = np.pad(features, ((0, 0), (0, -num_frames % chunk)))
    for start in range(0, num_frames, settings.num_frames):
        part = np.ascontiguousarray(features[:, start : start + settings.num_frames], np.float32)
        heard = min(settings.num_frames, num_frames - start)
        if num_vectors := count(heard):
            made.append(sound_input({"input_features": part, "num_frames": heard}, num_vectors))
    return made


def _separate_windows(
    count: Callable[[int], int], *, is_numbered: bool = False
) -> Callable[[LogMel, Section, Samples], list[MediaInput]]:
    """Return what cuts a sound into windows whose loudest frames are their own. count: vectors of so many frames.
    is_numbered: the encoder is told which window of its sound it hears."""

    def cut(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
        _check_is_heard(settings, samples)
        made, size = [], settings.num_frames * settings.hop_length
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            num_frames = -(-len(part) // settings.hop_length)
            mask = _mask(settings.num_frames, num_frames)
            arrays: dict[str, Any] = {**settings.window(settings.features(part)).arrays, "input_features_mask": mask}
            if is_numbered:
                arrays["window"] = start // size
            if num_vectors := count(num_frames):
                made.append(sound_input(arrays, num_vectors))
        return made

    return cut


def _whole_frames(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return as many windows as the sound begins, without silence behind it; the loudest frame of all counts."""
    hop = settings.hop_length
    samples = np.pad(samples, (0, max(2 * hop - len(samples), -len(samples) % hop)))
    joined = 2 * section.positive("stack_factor")
    return _cut(settings, settings.features(samples, 0), 1, lambda num_frames: -(-num_frames // joined))


def _stacked_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of a window whose encoder has a position for each two frames."""
    count = section.positive("max_source_positions", 1500)
    return 2 * count, -(-count // section.positive("stack_factor"))


def _whisper_mel(checkpoint: Checkpoint, section: Section) -> LogMel:
    """Return Whisper's own spectrogram, whose settings no file beside the weights has."""
    count = section.positive("max_source_positions", 1500)
    return LogMel(2 * count, count, section.positive("num_mel_bins", 80))


def _paired_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of a window with a position for each two frames."""
    num_frames = 2 * section.positive("max_source_positions", 1500)
    return num_frames, _num_paired(num_frames)


def _num_quartered(num_frames: int) -> int:
    """Return the vectors that a convolution with a stride of two makes, four of its states beside each other."""
    return ((num_frames - 1) // 2 - 3) // 4 + 1


def _num_merged(num_frames: int) -> int:
    """Return the vectors that a convolution with a stride of two makes, four of its states beside each other, of which
    zeros fill up the last."""
    return -(-((num_frames - 1) // 2 + 1) // 4)


def _merged_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of a window with a position for each two frames."""
    num_frames = 2 * section.positive("max_source_positions", 1500)
    return num_frames, _num_merged(num_frames)


def _moss_around(config: Section, encode: Callable[[str], list[int]]) -> Around:
    """Return the tokens of the seconds so far behind every few seconds of a sound. Raises CheckpointError or
    UnsupportedModel."""
    config.expect("audio_merge_size", 4)
    stated = read_section(Path(config.where).parent / PROCESSOR_FILES[-1], may_lack=True)
    seconds, rate = stated.count("time_marker_every_seconds", 2), stated.positive_float("audio_tokens_per_second", 12.5)
    group = int(seconds * rate)
    if group != seconds * rate:
        raise stated.error("time_marker_every_seconds", f"seconds with a whole number of the {rate:g} tokens of each")
    return Around(group=group, numbered=lambda number: encode(str(number * seconds))) if group else Around()


def _quartered_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors. Raises CheckpointError."""
    count, width = section.positive("max_position_embeddings", 1500), section.positive("hidden_size", 1280)
    if section.positive("intermediate_size", 5120) != 4 * width:
        raise section.error("intermediate_size", f"four times hidden_size, which is {width}")
    if count % 4 or 2 * count > _MOST_FRAMES:
        raise section.error("max_position_embeddings", f"a multiple of 4 of at most {_MOST_FRAMES // 2:,}")
    return 2 * count, _num_quartered(2 * count)


def _stacked(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound, with two neighbouring frames in each row."""
    _check_is_heard(settings, samples)
    features = settings.features(samples, 0)
    pairs = np.ascontiguousarray(features[:, : features.shape[1] // 2 * 2].T, np.float32)
    pairs = pairs.reshape(-1, 2 * settings.feature_size)
    num_vectors = -(-2 * len(pairs) // settings.num_frames) * settings.num_vectors
    return [sound_input({"input_features": pairs}, num_vectors)]


def _queried_window(section: Section) -> tuple[int, int]:
    """Return the number of frames of a window of the encoder's states, and of the vectors that it becomes."""
    return 2 * section.positive("window_size"), section.positive("window_size") // section.positive("downsample_rate")


def _stacked_bands(section: Section) -> int:
    """Return the bands of one frame: the encoder reads two at once. Raises CheckpointError."""
    size = section.positive("input_dim", 160)
    if size % 2:
        raise section.error("input_dim", "an even number: two frames")
    return size // 2


def _num_convolved(num_frames: int) -> int:
    """Return the vectors that three convolutions make of frames, each chunk by itself."""
    whole, rest = divmod(num_frames, _CHUNK)
    return whole * -(-_CHUNK // 8) + -(-rest // 8)


_CHUNK: Final = 100
_LEAST_SAMPLES: Final = 8_000
_MOST_FRAMES: Final = 1 << 16
_ULTRAVOX: Final = Words(
    "<|audio|>",
    "<|reserved_special_token_0|>",
    others=("<|fim_pad|>", "<unused0>", "<SPECIAL_20>", "<|begin_of_audio|>"),
)
"""Tokens that do not occur in texts for Llama 3, Qwen, Gemma, Mistral and GLM."""

SOUND_WRITERS: Final[Mapping[str, SoundWriter]] = {
    "audio_flamingo3": SoundWriter(_separate_windows(_num_paired), _paired_window),
    "fun_asr": SoundWriter(stacked_sound, most_s=120.0, read=StackedMel.of),
    "gemma3n": SoundWriter(
        gemma_sounds.filled_up, most_s=30.0, read=gemma_sounds.gemma3n_mel, around=gemma_sounds.gemma3n_around
    ),
    "gemma4": SoundWriter(
        gemma_sounds.quartered, most_s=30.0, read=gemma_sounds.gemma4_mel, around=gemma_sounds.gemma4_around
    ),
    "gemma4_unified": SoundWriter(
        gemma_sounds.each_frame, most_s=30.0, read=gemma_sounds.gemma4_frames, around=gemma_sounds.gemma4_around
    ),
    "glm_asr": SoundWriter(_separate_windows(_num_quartered), _quartered_window),
    "granite": SoundWriter(_stacked, _queried_window, _stacked_bands, most_s=600.0),
    "minicpm": SoundWriter(minicpm_windows, minicpm_window, around=minicpm_around, words=WORDS),
    "moss": SoundWriter(_separate_windows(_num_merged), _merged_window, around=_moss_around),
    "music_flamingo": SoundWriter(
        _separate_windows(_num_paired, is_numbered=True),
        _paired_window,
        most_s=1200.0,
        around=gemma_sounds.flamingo_around,
    ),
    "nemotron": SoundWriter(parakeet_pieces, parakeet_window, read=ParakeetMel.of, around=nemotron_around),
    "phi4": SoundWriter(phi4_sound, most_s=MOST_S, read=Phi4Mel.of, knows_images=True),
    "qwen2_5_omni": SoundWriter(_paired_chunks, _paired_chunks_window),
    "qwen2_audio": SoundWriter(_one_window),
    "qwen3_asr": SoundWriter(_chunked, _chunked_window),
    "qwen3_omni": SoundWriter(_omni_chunks, _chunked_window),
    "ultravox": SoundWriter(_whole_frames, _stacked_window, read=_whisper_mel, words=_ULTRAVOX),
    "vibevoice": SoundWriter(levelled_sound, most_s=MOST_LEVELLED_S, read=LevelledSamples.of, duration=DURATION),
    "voxtral": SoundWriter(_windows, _joined_window),
}
"""The writers by `sounds` of a `MediaFamily`."""
