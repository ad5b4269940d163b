"""Sounds in prompts: encoders get what transformers' processors make, and settings that fit nothing are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.core.media import MediaInput
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError, InvalidRequest, OctavoError
from octavo.models.loader import LoadedModel
from octavo.multimodal.processors.gemma_sounds import gemma4_frames, gemma4_mel, quartered
from octavo.multimodal.processors.log_mel import LogMel
from octavo.multimodal.processors.usm_mel import UsmMel
from octavo.multimodal.sound_prompts import SoundPrompts
from tests.fakes.hearing import ALL_KINDS, AUDIO, FAMILIES, GEMMAS, OMNI, extractor
from tests.fakes.vision_sizes import END, START
from tests.fakes.whisper import RATE, tone


def prompts(path: Path, family: str = "voxtral", **audio: Any) -> SoundPrompts:
    """The preprocessing stands where newer transformers write it."""
    make, architecture = (FAMILIES | ALL_KINDS | GEMMAS)[family]
    model, processor = make()
    settings = extractor() if family in ALL_KINDS else getattr(processor, "sounds", processor)
    config = model.to_dict() | {"architectures": [architecture]}
    part = "encoder_config" if family.startswith("granite_speech") else "audio_config"
    config.get("thinker_config", config)[part] |= audio
    (path / "config.json").write_text(json.dumps(config, default=str))
    (path / "processor_config.json").write_text(json.dumps({"feature_extractor": settings.to_dict()}, default=_plain))
    checkpoint = Checkpoint.open(path)
    section = sound_section(checkpoint)
    assert section is not None
    return SoundPrompts(checkpoint, section, _lines, {"audio": 4}, max_model_len=512, max_num_batched_tokens=64)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def _lines(text: str) -> list[int]:
    """Up to four line breaks are one token."""
    return [90 + min(4, len(text) - start) for start in range(0, len(text), 4)]


def test_line_breaks_around_sounds_are_joined_with_those_of_the_prompt(tmp_path: Path) -> None:
    reader = prompts(tmp_path, "gemma3n")
    written, media = reader.expand([7, 91, 115, 91, 115, 8, 91], {"audio": [tone(0.3), tone(0.4)]})
    sound = [5, *[115] * 20, 114]
    assert written == [7, 93, *sound, 94, 91, *sound, 92, 8, 91]
    assert [each.spans for each in media] == [((3, 21),), ((27, 21),)]
    expected = GEMMAS["gemma3n"][0]()[1].sounds(tone(0.3), return_tensors="np")
    assert np.array_equal(features_of(media[0]), expected["input_features"][0])


def test_a_sound_has_a_length_that_the_encoder_hears(tmp_path: Path) -> None:
    reader = prompts(tmp_path, "gemma3n")
    for sound, said in ((tone(0.03), "lasts 0.030 s, expected at least 0.04 s"), (tone(3.3), "expected at most 3.2 s")):
        with pytest.raises(InvalidRequest, match=said):
            reader.expand([115], {"audio": sound})
    assert prompts(tmp_path, "gemma4").most_s == 30.0


def test_a_sound_of_gemma_4_has_a_vector_for_each_fourth_frame(tmp_path: Path) -> None:
    reader, word = prompts(tmp_path, "gemma4"), OMNI["audio"]
    written, [media] = reader.expand([7, word, 8], {"audio": tone(1.0)})
    expected = GEMMAS["gemma4"][0]()[1].sounds([tone(1.0)], return_tensors="np")
    count = int(expected["input_features_mask"][0][::4].sum())
    assert written == [7, START, *[word] * count, END, 8]
    assert media.spans == ((2, count),)
    assert np.array_equal(features_of(media), expected["input_features"][0])


def test_a_sound_of_gemma_4_12b_has_a_vector_for_each_640_samples(tmp_path: Path) -> None:
    reader, word = prompts(tmp_path, "gemma4_unified"), OMNI["audio"]
    written, [media] = reader.expand([7, word, 8], {"audio": tone(1.01)})
    expected = GEMMAS["gemma4_unified"][0]()[1].sounds([tone(1.01)], return_tensors="np")
    assert written == [7, START, *[word] * 26, END, 8]
    assert np.array_equal(features_of(media), expected["input_features"][0])
    assert media.arrays["input_features_mask"].shape == (26,)
    with pytest.raises(InvalidRequest, match="expected at most 30 s"):
        reader.expand([word], {"audio": tone(30.1)})


@pytest.mark.parametrize("name", ["audio_samples_per_token", "feature_size"])
def test_frames_of_another_size_than_the_models_are_refused(name: str, tmp_path: Path) -> None:
    prompts(tmp_path, "gemma4_unified")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({name: 320}))
    checkpoint = Checkpoint.open(tmp_path)
    section = sound_section(checkpoint)
    assert section is not None
    with pytest.raises(OctavoError, match=f"{name} is 320, expected 640"):
        gemma4_frames(checkpoint, section)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dither": 0.1}, "dither is 0.1, expected 0.0"),
        ({"feature_size": 80}, "feature_size is 80, expected 16"),
        ({"sampling_rate": 3}, "sampling_rate is 3, expected 1,000 to 384,000"),
        ({"hop_length_ms": 0.01}, "hop_length_ms is 0.01, expected at least one sample"),
        ({"per_bin_mean": [1.0]}, r"per_bin_mean is \[1.0\], expected 16 numbers"),
        ({"per_bin_mean": ["a"] * 16}, r"per_bin_mean is .*, expected 16 numbers"),
        ({"per_bin_stddev": [1.0] * 15 + [0.0]}, r"per_bin_stddev is .*, expected 16 numbers"),
        ({"mel_floor": 0.0}, "mel_floor is 0.0, expected a number above 0"),
    ],
)
def test_spectrograms_that_gemma_does_not_hear_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    with pytest.raises(OctavoError, match=message):
        UsmMel.of(tmp_path, "Gemma4AudioFeatureExtractor", 16, 20.0, 750)


@pytest.mark.parametrize("hop_ms", [2.5, 10.0, 25.0])
def test_the_longest_sound_of_gemma_4_has_the_vectors_that_are_planned_for(hop_ms: float, tmp_path: Path) -> None:
    prompts(tmp_path, "gemma4")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"hop_length_ms": hop_ms, "feature_size": 16}))
    checkpoint = Checkpoint.open(tmp_path)
    section = sound_section(checkpoint)
    assert section is not None
    mel = gemma4_mel(checkpoint, section)
    [media] = quartered(mel, section, tone(mel.seconds - 0.001))
    assert mel.num_vectors - 2 <= media.num_embeddings <= mel.num_vectors


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


def test_a_short_sound_is_filled_up_to_half_a_second(tmp_path: Path) -> None:
    sound = tone(0.2)
    made = FAMILIES["qwen3_asr"][0]()[1](sound, sampling_rate=RATE, padding=True, return_attention_mask=True)
    written, [media] = prompts(tmp_path, "qwen3_asr").expand([AUDIO], {"audio": sound})
    assert written == [AUDIO] * 7  # of 50 frames, eight each
    assert np.abs(features_of(media) - made["input_features"][0].numpy()).max() < 1e-4
    mask = np.frombuffer(media.arrays["input_features_mask"].data, np.int64)
    assert mask.tolist() == made["attention_mask"][0].tolist() == [1] * 50 + [0] * 50


def test_a_sound_that_is_encoded_at_once_has_no_more_tokens_than_a_step_or_half_a_minute(tmp_path: Path) -> None:
    reader = prompts(tmp_path, "granite_speech")
    written, [media] = reader.expand([AUDIO], {"audio": np.zeros(30 * RATE, np.float32)})
    assert len(written) == media.num_embeddings == 300
    with pytest.raises(InvalidRequest, match="becomes 312 tokens, .* at most 300; send it in parts, or raise max"):
        reader.expand([AUDIO], {"audio": np.zeros(31 * RATE, np.float32)})


REFUSED = [
    ("qwen2_5_omni", {"n_window": 21}, "thinker_config.audio_config.n_window is 21, expected an even number"),
    ("qwen3_omni_moe", {"n_window": 40}, "thinker_config.audio_config.n_window is 40, expected 50"),
    ("qwen3_omni_moe", {"max_source_positions": 9}, "max_source_positions is 9, expected at least the 13 of a chunk"),
    ("glmasr", {"intermediate_size": 64}, "audio_config.intermediate_size is 64, expected four times hidden_size"),
    ("glmasr", {"max_position_embeddings": 90}, "audio_config.max_position_embeddings is 90, expected a multiple of 4"),
    ("glmasr", {"max_position_embeddings": 10**9}, "max_position_embeddings is .*, expected .* at most 32,768"),
    ("glmasr", {"rope_parameters": {"rope_theta": "x"}}, 'rope_parameters.rope_theta is "x", expected a number'),
    ("glmasr", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "expected a share of a head, at most 1"),
    ("qwen3_asr", {"attention_dropout": -1}, "attention_dropout is -1, expected a share, 0 to 1"),
    *(
        ("gemma3n", {"sscp_conv_stride_size": value}, "sscp_conv_stride_size is .*, expected two pairs of integers")
        for value in ([[], [2, 2]], [[2, 2]], [2, 2])
    ),
    ("granite_speech", {"input_dim": 31}, "encoder_config.input_dim is 31, expected an even number"),
    ("granite_speech", {"num_heads": 0}, "encoder_config.num_heads is 0, expected an integer of at least 1"),
    ("granite_speech", {"cat_hidden_layers": [1]}, "projector_config.encoder_hidden_size is 32, .*, which is 64"),
    ("granite_speech_plus", {"cat_hidden_layers": [3]}, r"cat_hidden_layers is \[3\], .* layers, from 0 to 2"),
    ("granite_speech_plus", {"cat_hidden_layers": [1, 1]}, r"cat_hidden_layers is \[1, 1\], expected each layer once"),
    ("voxtral", {"intermediate_size": 96}, r"audio_config.intermediate_size is 96, expected a divisor of .*, 3,200"),
    ("qwen3_asr", {"n_window": 20}, "audio_config.n_window is 20, expected 50"),
    ("qwen3_asr", {"n_window_infer": 150}, "audio_config.n_window_infer is 150, expected a multiple of .*, 100"),
    (
        "qwen3_asr",
        {"max_position_embeddings": 12},
        "audio_config.max_position_embeddings is 12, expected at least the 13",
    ),
]


@pytest.mark.parametrize(("family", "audio", "message"), REFUSED)
def test_sizes_for_no_encoder_are_refused(family: str, audio: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        prompts(tmp_path, family, **audio)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"win_length": 399}, "win_length is 399, expected an even number of at most n_fft, which is 400"),
        ({"n_fft": 1 << 20}, "n_fft is 1048576, expected 1 to 65,536"),
        ({"hop_length": 10**9}, "hop_length is 1000000000, expected 1 to 65,536"),
        ({"sampling_rate": 3}, "sampling_rate is 3, expected 1,000 to 384,000"),
    ],
)
def test_spectrograms_that_no_sound_survives_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    with pytest.raises(CheckpointError, match=message):
        LogMel.of(tmp_path, {"max_source_positions": 100, "num_mel_bins": 80})


def test_an_encoder_whose_vectors_are_too_wide_is_refused(tmp_path: Path) -> None:
    prompts(tmp_path, "qwen3_asr", output_dim=64)
    with pytest.raises(CheckpointError, match="audio_config.output_dim is 64, expected the text model's hidden_size"):
        LoadedModel.open(Checkpoint.open(tmp_path), Mesh.single(), torch.float32)


def test_an_unknown_activation_is_refused_by_name(tmp_path: Path) -> None:
    prompts(tmp_path, "qwen3_asr", activation_function="magic")
    with pytest.raises(CheckpointError, match='audio_config.activation_function is "magic": transformers '):
        LoadedModel.open(Checkpoint.open(tmp_path), Mesh.single(), torch.float32)
