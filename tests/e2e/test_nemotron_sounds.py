"""Sounds of Nemotron 3 Omni: what transformers computes, and `==` for any schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.sounds import sound_section
from octavo.config.section import Section
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.processors.parakeet_mel import ParakeetMel, nemotron_around, parakeet_pieces
from tests.e2e.test_images import assert_agrees, bits, generate
from tests.fakes.checkpoints import edit_config
from tests.fakes.hearing import OMNI, make_nemotron_omni
from tests.fakes.vision import image, load_vision_oracle
from tests.fakes.whisper import RATE, tone
from tests.models.test_released_nemotron import as_released

pytestmark = pytest.mark.slow

PROMPTS: list[Any] = [
    {"prompt": "w1 <img> w2", "multi_modal_data": {"audio": (tone(1.3, 440.0), RATE)}},
    {
        "prompt": "w1 <image> w2 <img> w7",
        "multi_modal_data": {"audio": (tone(0.73, 300.0), RATE), "image": image(1, 70, 90)},
    },
    {"prompt": "<img> w2 <img>", "multi_modal_data": {"audio": [(tone(0.02, 520.0), RATE), (tone(1.3), RATE)]}},
    "w1 w2 w3",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nemotron_omni(tmp_path_factory.mktemp("nemotron_omni"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS)


def heard(samples: Any) -> dict[str, torch.Tensor]:
    """What transformers' feature extractor makes of a sound."""
    from transformers import ParakeetFeatureExtractor

    return dict(ParakeetFeatureExtractor(feature_size=16)([samples], sampling_rate=RATE, return_tensors="pt"))


def test_logprobs_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    oracle, output = load_vision_oracle(path, "NemotronH_Omni_Reasoning_V3"), expected[0]
    drawn = list(output.outputs[0].token_ids)
    drawn = drawn[: drawn.index(OMNI["audio"])] if OMNI["audio"] in drawn else drawn
    ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
    made = heard(tone(1.3, 440.0))
    with torch.inference_mode():
        logits = oracle(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=made["input_features"],
            input_features_mask=made["attention_mask"],
        ).logits[0]
    assert_agrees(output, drawn, logits)


@pytest.mark.parametrize("seconds", [0.1, 0.73, 2.6049])
def test_features_are_those_of_transformers(seconds: float) -> None:
    samples = tone(seconds, 440.0) + np.random.RandomState(1).randn(int(seconds * RATE)).astype(np.float32) / 50
    (made,) = parakeet_pieces(ParakeetMel(16), Section({}, "a"), samples)
    wanted = heard(samples)
    count = int(wanted["attention_mask"].sum())
    found = np.frombuffer(made.arrays["input_features"].data, np.float32).reshape(-1, 16)
    torch.testing.assert_close(torch.tensor(found), wanted["input_features"][0, :count], rtol=0, atol=2e-3)


def test_a_long_sound_is_cut_into_half_minutes_and_a_short_end_filled_up() -> None:
    settings, samples = ParakeetMel(16), tone(60.05, 440.0)
    pieces = parakeet_pieces(settings, Section({}, "a"), samples)
    assert [each.num_embeddings for each in pieces] == [375, 375, 2]
    assert [each.arrays["input_features"].shape for each in pieces] == [(3000, 16), (3000, 16), (10, 16)]
    assert pieces[1].digest == parakeet_pieces(settings, Section({}, "a"), samples[30 * RATE : 60 * RATE])[0].digest


def test_marks_are_around_a_sound() -> None:
    around = nemotron_around(Section({}, "a"), lambda text: [len(text)])
    assert (around.before, around.end, around.behind) == ([10], [], [8])


@pytest.mark.parametrize(
    "args",
    [
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 19},
        pytest.param({"enable_prefix_caching": False, "max_num_seqs": 1, "threads": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    assert bits(generate(path, PROMPTS * 2, **args)) == bits(expected) * 2


@pytest.mark.long
def test_the_release_is_the_model_of_transformers_layout(tmp_path: Path, expected: list[RequestOutput]) -> None:
    path = as_released(make_nemotron_omni(tmp_path))
    config = json.loads((path / "config.json").read_text())
    sounds = {**config["audio_config"], "model_type": "parakeet"}
    for name in ("attention_bias", "scale_input"):
        sounds.pop(name)
    own = {"sound_config": sounds, "sound_context_token_id": OMNI["audio"]}
    edit_config(path, ("audio_config", "audio_token_id"), **own, architectures=["NemotronH_Super_Omni_Reasoning_V3"])
    tensors = load_file(path / "model.safetensors")
    assert "sound_encoder.encoder.layers.0.conv.norm.running_mean" in tensors
    assert "sound_projection.linear1.bias" in tensors
    # of which releases have some that nothing reads
    tensors["sound_encoder.encoder.feature_extractor.fb"] = torch.zeros(2)
    tensors["sound_encoder.encoder.layers.0.conv.depthwise_conv.bias"] = torch.ones(32)
    save_file(tensors, path / "model.safetensors")
    assert bits(generate(path, PROMPTS)) == bits(expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"subsampling_factor": 4}, "subsampling_factor is 4, expected 8"),
        ({"projection_eps": 1e-6}, "projection_eps is 1e-06, expected 1e-05"),
        ({"projection_hidden_size": 0}, "projection_hidden_size is 0, expected"),
        ({"hop_length": 320}, "hop_length is 320, expected 160"),
        ({"sampling_rate": 8000}, "sampling_rate is 8000, expected 16000"),
    ],
)
def test_settings_of_another_encoder_are_refused(path: Path, changes: dict[str, Any], said: str) -> None:
    values = json.loads((path / "config.json").read_text())
    values["audio_config"] |= changes
    checkpoint = Checkpoint(path, values)
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        ParakeetMel.of(checkpoint, sound_section(checkpoint) or Section({}, "a"))


def test_without_an_encoder_of_sounds_images_are_read(tmp_path: Path) -> None:
    path = make_nemotron_omni(tmp_path)
    edit_config(path, audio_config=None)
    heard, seen = generate(path, [PROMPTS[0], {"prompt": "<image>", "multi_modal_data": {"image": image(1, 70, 90)}}])
    assert "this model reads text and images" in str(heard.error)
    assert seen.error is None
