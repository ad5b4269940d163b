"""Sounds of any form become the same samples; what is no sound, or too much of one, is refused by name and at once."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import soundfile

from octavo.errors import InvalidRequest
from octavo.multimodal.processors.log_mel import LogMel
from octavo.multimodal.sound import Resampler, decoded, read_array, resampled
from tests.fakes.whisper import RATE, tone


def wav(samples: Any, rate: int = RATE, form: str = "WAV", **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, **options)
    return file.getvalue()


@pytest.mark.parametrize("source", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_keeps_its_pitch_and_its_size_at_another_rate(source: int) -> None:
    time = np.arange(source) / source
    found = resampled(np.sin(2 * np.pi * 1000 * time).astype(np.float32), source, RATE)
    assert len(found) == RATE
    expected = np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE)
    assert np.abs(found - expected)[400:-400].max() < 2e-4


def test_what_the_new_rate_cannot_hold_is_left_out() -> None:
    time = np.arange(48_000) / 48_000
    high = np.sin(2 * np.pi * 12_000 * time).astype(np.float32)
    assert np.abs(resampled(high, 48_000, RATE))[400:-400].max() < 1e-4


@pytest.mark.parametrize(("form", "most"), [("WAV", 1e-4), ("FLAC", 1e-4), ("OGG", 0.05), ("MP3", 0.05)])
def test_formats_hold_the_same_sound(form: str, most: float) -> None:
    sound = tone(0.5)
    found = decoded(wav(np.stack([sound, sound], axis=1), form=form), RATE, "file")
    assert np.abs(found[1000:7000] - sound[1000:7000]).max() < most


@pytest.mark.parametrize("source", [383_999, 96_001])
def test_a_rate_without_common_factors_takes_little_time(source: int) -> None:
    """It has 16,000 filters of up to 769 taps, whose kernel is computed once."""
    sound, start = np.sin(np.arange(source // 2) / source * 3000).astype(np.float32), time.thread_time()
    found = resampled(sound, source, RATE)
    assert time.thread_time() - start < 3
    assert np.abs(found - np.sin(np.arange(RATE // 2) / RATE * 3000))[400:-400].max() < 2e-4


def test_channels_are_averaged_and_arrays_have_a_rate() -> None:
    sound = tone(0.2)
    both = read_array((np.stack([sound, -sound]), RATE), RATE, "audio")
    assert not both.any()
    assert len(read_array((sound, 8_000), RATE, "audio")) == 2 * len(sound)
    assert np.array_equal(read_array({"array": sound, "sampling_rate": RATE}, RATE, "audio"), sound)


def lying_header() -> bytes:
    data = bytearray(wav(np.zeros(1000, np.float32)))
    data[40:44] = struct.pack("<I", 0x7FFF_FFF0)
    return bytes(data)


REFUSED: dict[str, tuple[bytes, str]] = {
    "no sound": (b"GIF89a" + bytes(200), "file is no sound that can be decoded"),
    "nothing": (b"", "file is no sound that can be decoded"),
    "cut in the header": (wav(np.zeros(1000))[:30], "file is no sound that can be decoded|file has no samples"),
    "no samples": (wav(np.zeros(0, np.float32)), "file has no samples"),
    "no rate": (wav(np.zeros(10, np.float32), 999), "file has 999 samples per second, expected 1,000 to 384,000"),
    "absurd rate": (wav(np.zeros(10, np.float32), 2_000_000_000), "file has 2,000,000,000 samples per second"),
    "channels": (wav(np.zeros((10, 9), np.float32)), "file has 9 channels, expected at most 8"),
    "NaN": (
        wav(np.array([0.0, np.nan], np.float32), subtype="FLOAT"),
        r"file: sample 1 is nan, expected a number near \[-1, 1\]",
    ),
    "infinite": (wav(np.array([np.inf], np.float32), subtype="FLOAT"), "file: sample 0 is inf"),
    "hours of silence": (
        wav(np.zeros(1000 * 3700, np.int16), 1000, "FLAC"),
        "file lasts 3,700.0 s or more, expected at",
    ),
}


@pytest.mark.parametrize(("data", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_hostile_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        decoded(data, RATE, "file")
    assert error.value.field == "file"


def test_a_codec_without_a_way_back_is_decoded() -> None:
    """A telephone's: 160 samples a frame, of which libsndfile writes whole blocks."""
    data = wav(tone(0.5, rate=8_000), 8_000, subtype="GSM610")
    assert abs(len(decoded(data, RATE, "file")) - RATE // 2) < 1000


def test_what_is_longer_than_a_model_hears_is_not_decoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    file = wav(np.zeros(RATE * 60, np.int16), RATE, "FLAC")
    added: list[int] = []
    monkeypatch.setattr(Resampler, "add", lambda _, samples: added.append(len(samples)))
    with pytest.raises(InvalidRequest, match=r"file lasts 60.0 s or more, expected at most 2 s; send it in parts"):
        decoded(file, RATE, "file", 2.0)
    assert not added


def test_the_reason_of_a_file_that_is_no_sound_names_no_object() -> None:
    with pytest.raises(InvalidRequest) as error:
        decoded(bytes(100), RATE, "file")
    assert "0x" not in str(error.value)


def test_a_length_that_is_not_there_takes_no_memory() -> None:
    tracemalloc.start()
    found = decoded(lying_header(), RATE, "file")
    assert len(found) <= 1000
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_file_that_breaks_off_is_heard_so_far() -> None:
    whole = wav(tone(0.5))
    assert 0 < len(decoded(whole[: len(whole) // 2], RATE, "file")) < RATE // 2


@pytest.mark.parametrize(
    "value",
    [3, "x", (np.zeros(4), 0.5), (np.zeros(4), True), (np.zeros(4), float("nan")), np.zeros((1, 2, 3)), [], [[], []]],
)
def test_what_is_no_array_of_samples_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="audio"):
        read_array(value, RATE, "audio")


def test_the_spectrogram_is_that_of_the_feature_extractor_in_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import WhisperFeatureExtractor

    sound, settings = tone(2.3), LogMel(100, 50, feature_size=16)
    extractor: Any = WhisperFeatureExtractor(feature_size=16)
    expected = extractor._np_extract_fbank_features(sound[None], "cpu")[0]
    assert np.array_equal(settings.features(sound), expected)
    monkeypatch.setattr("octavo.multimodal.processors.log_mel._PIECE", 37)
    assert np.array_equal(settings.features(sound), expected)
    window = settings.window(expected, 180)
    found = np.frombuffer(window.arrays["input_features"].data, np.float32).reshape(16, 100)
    assert np.array_equal(found[:, :50], expected[:, 180:230])
    assert not found[:, 50:].any()
    assert window.digest != settings.window(expected, 181).digest


@pytest.mark.parametrize("source", [8_000, 44_100, 16_000])
def test_where_input_is_cut_changes_nothing(source: int) -> None:
    sound, resampler = tone(19.0, rate=source), Resampler(source, RATE)
    for start in range(0, len(sound), 99_991):
        resampler.add(sound[start : start + 99_991])
    found = resampler.end()
    assert len(found) == 19 * RATE
    assert np.array_equal(found, resampled(sound, source, RATE))
    edge = 8 * source  # between two pieces
    near = resampled(sound[edge - source : edge + source], source, RATE)
    assert np.abs(found[8 * RATE - 4000 : 8 * RATE + 4000] - near[RATE - 4000 : RATE + 4000]).max() < 1e-6
