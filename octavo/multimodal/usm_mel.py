"""The spectrogram that Gemma 3n's encoder of sounds reads, by transformers' feature extractor, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import read_json_object
from octavo.config.section import Section
from octavo.multimodal.sound import RATES, Samples

_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_MOST_S: Final = 30
"""Seconds, of which the encoder hears no more."""
_MOST_MS: Final = 1000.0
"""Of a frame, and between two."""
_NUMBERS: Final = ("min_frequency", "max_frequency", "preemphasis", "input_scale_factor", "mel_floor")
_FLAGS: Final = ("preemphasis_htk_flavor", "fft_overdrive")
_BINS: Final = ("per_bin_mean", "per_bin_stddev")


class UsmMel(msgspec.Struct, frozen=True, dict=True):
    """settings: of the feature extractor, by its names. seconds: how long a sound may be. num_vectors: of any sound."""

    settings: Mapping[str, Any]
    sampling_rate: int
    seconds: float
    num_vectors: int

    @classmethod
    def of(cls, path: Path, encoder: Section, num_tokens: int) -> UsmMel:
        """Read the settings of a checkpoint. encoder: its part in config.json. num_tokens: of any sound, without the
        one behind it. Raises CheckpointError or UnsupportedModel."""
        file = next((path / each for each in _FILES if (path / each).is_file()), path / _FILES[0])
        values = read_json_object(file) if file.is_file() else {}
        found = values.get("feature_extractor", values)
        section = Section(found if isinstance(found, dict) else {}, str(file))
        num_bands, rate = encoder.positive("input_feat_size", 128), section.positive("sampling_rate", 16_000)
        section.expect("feature_size", num_bands, default=num_bands)
        section.expect("dither", 0.0, default=0.0)  # noise, with which a sound never sounds the same twice
        if rate not in RATES:
            raise section.error("sampling_rate", f"{RATES.start:,} to {RATES.stop - 1:,}")
        lengths = {"frame_length_ms": 32.0, "hop_length_ms": 10.0}
        for name, default in lengths.items():
            lengths[name] = section.positive_float(name, default)
            if not 1000.0 / rate <= lengths[name] <= _MOST_MS:
                raise section.error(name, f"at least one sample, and at most {_MOST_MS:,.0f}")
        settings: dict[str, Any] = {"feature_size": num_bands, "sampling_rate": rate, **lengths}
        settings |= {name: section.float(name) for name in _NUMBERS if section.values.get(name) is not None}
        settings |= {name: section.bool(name, True) for name in _FLAGS}
        for name in _BINS:
            numbers = section.values.get(name)
            if numbers is not None and (not isinstance(numbers, list) or len(numbers) != num_bands):
                raise section.error(name, f"{num_bands} numbers, one for each band")
            settings[name] = numbers
        joined = encoder.positive("conf_reduction_factor", 4) * _stride(encoder)
        hop = round(rate * lengths["hop_length_ms"] / 1000.0)
        return cls(settings, rate, min(_MOST_S, num_tokens * joined * hop / rate), num_tokens + 1)

    @cached_property
    def _extractor(self) -> Any:
        import transformers

        return transformers.Gemma3nAudioFeatureExtractor(**self.settings)

    def features(self, samples: Samples) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return [frames, bands] of a sound, and which of them are frames of it, [frames]."""
        made = self._extractor(samples, truncation=False, return_tensors="np")
        return made["input_features"][0], made["input_features_mask"][0].astype(np.int64)


def _stride(encoder: Section) -> int:
    """Return the frames that two convolutions join. Raises CheckpointError."""
    strides = encoder.values.get("sscp_conv_stride_size", [[2, 2], [2, 2]])
    is_pair = isinstance(strides, list) and len(strides) == 2
    if not is_pair or not all(isinstance(each, list) and type(each[0]) is int and each[0] > 0 for each in strides):
        raise encoder.error("sscp_conv_stride_size", "two pairs of integers")
    return int(strides[0][0] * strides[1][0])
