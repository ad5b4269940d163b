"""The spectrogram that Whisper's encoder reads, by transformers' numpy functions, as its feature extractor makes it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.media.images import PROCESSOR_FILES
from octavo.config.section import Section, read_section
from octavo.core.media import MediaInput, typed_array
from octavo.multimodal.sound import RATES, Samples

PREPROCESSOR_CONFIG: Final = PROCESSOR_FILES[0]
_LENGTHS: Final = range(1, (1 << 16) + 1)
"""Samples of a frame, and between two: more would take all memory."""
_PIECE: Final = 1 << 12
"""Frames whose spectra are in memory at once."""


class LogMel(msgspec.Struct, frozen=True, dict=True):
    """Settings of Whisper's feature extractor, by its names."""

    num_frames: int
    """Frames of a window, as the encoder reads it."""
    num_vectors: int
    """Vectors that the encoder makes of a window."""
    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400
    win_length: int = 400
    is_whole: bool = False
    """Whether bands and frames are torchaudio's: HTK bands up to half the sampling rate, and a frame around the end of
    the sound. Else they are Whisper's."""

    @classmethod
    def of(cls, path: Path, config: Mapping[str, Any]) -> LogMel:
        """Read the settings of a checkpoint. Raises CheckpointError."""
        section = extractor_settings(path)
        settings = section.values.get("melspec_kwargs")
        is_whole = isinstance(settings, dict)
        if isinstance(settings, dict):  # torchaudio's names
            values = {"win_length": 400, "n_fft": 512, "n_mels": 80, **settings}
            values |= {"feature_size": values["n_mels"], "sampling_rate": values.get("sample_rate")}
            section = Section(values, section.where)
        model = Section(config, str(path / "config.json"))
        num_vectors = model.positive("max_source_positions")
        sizes = {name: section.positive(name, cls.__struct_defaults__[i]) for i, name in enumerate(_SIZES)}
        width = section.positive("win_length", sizes["n_fft"])
        if width > sizes["n_fft"] or width % 2:
            raise section.error("win_length", f"an even number of at most n_fft, which is {sizes['n_fft']}")
        for name, allowed in (("sampling_rate", RATES), ("n_fft", _LENGTHS), ("hop_length", _LENGTHS)):
            if sizes[name] not in allowed:
                raise section.error(name, f"{allowed.start:,} to {allowed.stop - 1:,}")
        if sizes["feature_size"] != model.positive("num_mel_bins"):
            raise section.error("feature_size", f"num_mel_bins of config.json, which is {model.values['num_mel_bins']}")
        return cls(2 * num_vectors, num_vectors, **sizes, win_length=width, is_whole=is_whole)

    @property
    def seconds(self) -> float:
        """The length of a window, in seconds."""
        return self.num_frames * self.hop_length / self.sampling_rate

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        from transformers.audio_utils import mel_filter_bank

        num_bins, rate = 1 + self.n_fft // 2, self.sampling_rate
        if self.is_whole:
            return mel_filter_bank(num_bins, self.feature_size, 0.0, rate // 2, rate, norm=None, mel_scale="htk")
        return mel_filter_bank(num_bins, self.feature_size, 0.0, 8000.0, rate, norm="slaney", mel_scale="slaney")

    def features(self, samples: Samples, least: int | None = None) -> NDArray[np.float32]:
        """Return [bands, frames] of a sound, a frame for each hop; silence fills the first window, or `least` frames.

        The loudest frame of the whole sound sets how far down others reach.
        """
        from transformers.audio_utils import spectrogram, window_function

        missing = (self.num_frames if least is None else least) * self.hop_length - len(samples)
        samples = np.pad(samples, (0, missing)) if missing > 0 else samples
        num_frames, window = len(samples) // self.hop_length + self.is_whole, window_function(self.win_length, "hann")
        half = self.win_length // 2
        out = np.empty((self.feature_size, num_frames), np.float32)
        for start in range(0, num_frames, _PIECE):
            stop = min(start + _PIECE, num_frames)
            first = start * self.hop_length - half
            end = (stop - 1) * self.hop_length + half
            beyond = max(0, -first), max(0, end - len(samples))  # a frame lies around its sample
            piece = np.pad(samples[max(0, first) : end], beyond, mode="reflect")
            out[:, start:stop] = spectrogram(
                piece, window, self.win_length, self.hop_length, fft_length=self.n_fft, power=2.0, center=False,
                mel_filters=self._filters, log_mel="log10",
            )  # fmt: skip
        np.maximum(out, out.max() - 8.0, out=out)
        out += 4.0
        out /= 4.0
        return out

    def window(self, features: NDArray[np.float32], start: int = 0) -> MediaInput:
        """Return the input of the encoder for the window from frame `start` on; zeros follow the end of the sound."""
        part = features[:, start : start + self.num_frames]
        part = np.pad(part, ((0, 0), (0, self.num_frames - part.shape[1])))
        typed = typed_array(part)
        digest = sha256(b"log mel\0" + repr(msgspec.structs.astuple(self)).encode() + typed.data).digest()
        return MediaInput("audio", digest, (), self.num_vectors, {"input_features": typed})


def extractor_settings(path: Path) -> Section:
    """Return the settings of a checkpoint's feature extractor, none where no file has them. Raises CheckpointError."""
    file = next((path / each for each in PROCESSOR_FILES if (path / each).is_file()), path / PREPROCESSOR_CONFIG)
    values = read_section(file, may_lack=True).values
    for name in ("feature_extractor", "audio_processor"):
        values = nested if isinstance(nested := values.get(name), dict) else values
    return Section(values, str(file))


def sampling_rate(settings: Section) -> int:
    """Return the samples per second of a feature extractor. Raises CheckpointError."""
    rate = settings.positive("sampling_rate", 16_000)
    if rate not in RATES:
        raise settings.error("sampling_rate", f"{RATES.start:,} to {RATES.stop - 1:,}")
    return rate


def kaldi_filters(size: int, bands: int, lowest: float, highest: float, rate: int) -> NDArray[np.float32]:
    """Return the filters [size // 2 + 1, bands] of Kaldi's spectrogram. size: samples of a transform."""
    from transformers.audio_utils import mel_filter_bank

    edges = size // 2 + 1, bands, lowest, highest, rate
    return mel_filter_bank(*edges, triangularize_in_mel_space=True, mel_scale="kaldi").astype(np.float32)


_SIZES: Final = ("feature_size", "sampling_rate", "hop_length", "n_fft")
