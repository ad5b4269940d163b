"""Sounds in prompts: encoders get what transformers' processors make, and settings that fit nothing are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.config.sounds import sound_section
from octavo.core.media import MediaInput
from octavo.errors import CheckpointError
from octavo.multimodal.sound_prompts import SoundPrompts
from tests.fakes.hearing import AUDIO, FAMILIES, extractor
from tests.fakes.whisper import RATE, tone


def prompts(path: Path, **audio: Any) -> SoundPrompts:
    """Of a Voxtral, whose preprocessing stands where newer transformers write it."""
    config = FAMILIES["voxtral"][0]()[0].to_dict() | {"architectures": ["VoxtralForConditionalGeneration"]}
    config["audio_config"] |= audio
    (path / "config.json").write_text(json.dumps(config, default=str))
    (path / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor().to_dict()}))
    checkpoint = Checkpoint.open(path)
    section = sound_section(checkpoint)
    assert section is not None
    return SoundPrompts(checkpoint, section, {"audio": 4}, max_model_len=512)


def test_a_long_sound_is_windows_of_transformers_features(tmp_path: Path) -> None:
    sound = tone(4.5)
    options = {"padding": True, "pad_to_multiple_of": 2 * RATE, "truncation": False, "return_tensors": "np"}
    expected = extractor()(sound, sampling_rate=RATE, **options)["input_features"][0]
    written, media = prompts(tmp_path).expand([7, AUDIO, 8], {"audio": (sound, RATE)})
    assert written == [7, *[AUDIO] * 75, 8]
    assert [each.spans for each in media] == [((1, 25),), ((26, 25),), ((51, 25),)]
    found = np.concatenate([features_of(each) for each in media], axis=1)
    assert found.shape == expected.shape == (16, 600)
    assert np.abs(found - expected).max() < 1e-6
    assert len({each.digest for each in media}) == 3


def features_of(media: MediaInput) -> Any:
    array = media.arrays["input_features"]
    return np.frombuffer(array.data, np.float32).reshape(array.shape)


def test_vectors_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    message = r"audio_config.intermediate_size is 96, expected a divisor of .*, 3,200"
    with pytest.raises(CheckpointError, match=message):
        prompts(tmp_path, intermediate_size=96)
