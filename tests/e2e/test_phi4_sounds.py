"""Sounds of Phi-4-multimodal: what transformers computes with the adapter for them, and `==` for any schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.media.sounds import sound_section
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.multimodal.processors.phi4_sounds import MOST_S, Phi4Mel
from tests.e2e.test_images import assert_agrees, bits, generate
from tests.fakes.checkpoints import edit_config
from tests.fakes.phi4 import as_released
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint
from tests.fakes.vision_sizes import IMAGE, VIDEO
from tests.fakes.whisper import RATE, tone

pytestmark = pytest.mark.slow

ARCHITECTURE = "Phi4MultimodalForCausalLM"
SOUND = VIDEO
"""The token that stands for a sound here."""
LONG = tone(41.0, 300.0)
"""More than 500 vectors, which the encoder reads in two parts."""
PROMPTS: list[Any] = [
    {"prompt": "w1 <video> w2", "multi_modal_data": {"audio": (tone(1.3, 440.0), RATE)}},
    {"prompt": "<video> w4 w5", "multi_modal_data": {"audio": (LONG, RATE)}},
    # with an image they are projected in another way, and the prompt has the other adapter
    {
        "prompt": "w1 <image> w2 <video> w7",
        "multi_modal_data": {"audio": (tone(1.3, 440.0), RATE), "image": image(1, 70, 90)},
    },
    {"prompt": "<video> w2 <video> w7", "multi_modal_data": {"audio": [(tone(0.4, 520.0), RATE), (tone(1.3), RATE)]}},
    "w1 w2 w3",
]
ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 160,
    "max_num_seqs": 4,
    "max_loras": 2,
    "max_num_batched_tokens": 600,
    "max_model_len": 600,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("phi4_multimodal"))


def made(path: Path) -> Path:
    make_vision_checkpoint("phi4_multimodal", path)
    edit_config(path, max_position_embeddings=1024)
    return path


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS, **ARGS)


def features(samples: Any) -> torch.Tensor:
    from transformers import Phi4MultimodalFeatureExtractor

    made: torch.Tensor = Phi4MultimodalFeatureExtractor()([samples], sampling_rate=RATE)["audio_input_features"]
    return made


def test_features_are_those_of_transformers(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    section = sound_section(checkpoint)
    assert section is not None
    settings = Phi4Mel.of(checkpoint, section)
    for samples in (tone(0.025), tone(1.37), LONG, np.random.RandomState(0).randn(5000).astype(np.float32)):
        wanted = features(samples)[0].numpy()
        made = settings.features(samples)
        assert made.shape == wanted.shape
        assert np.abs(made - wanted).max() <= 2e-3  # logarithms of sums near 1
        assert np.abs(made - wanted).mean() <= 1e-5
    assert settings.features(tone(0.0249)).shape == (0, 80)


def test_logprobs_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    checkpoint = Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    images = ImagePrompts(checkpoint, settings, lambda _: [], {"image": 1})
    for prompt, output in zip(PROMPTS[:3], expected, strict=False):
        given = prompt["multi_modal_data"]
        adapter = "vision-lora" if "image" in given else "speech-lora"
        oracle = load_vision_oracle(path, ARCHITECTURE, adapter)
        heard = features(given["audio"][0])
        inputs: dict[str, Any] = {"audio_input_features": heard}
        inputs["audio_embed_sizes"] = torch.tensor([-(-heard.shape[1] // 8)])
        if "image" in given:
            inputs |= {
                name: torch.from_numpy(array)
                for name, array in images.arrays(given["image"]).items()
                if name in images.writer.reads
            }
        drawn = list(output.outputs[0].token_ids)
        drawn = drawn[: next((place for place, each in enumerate(drawn) if each in (IMAGE, SOUND)), None)]
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        assert int((ids == SOUND).sum()) == int(inputs["audio_embed_sizes"])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, **inputs).logits[0]
        assert_agrees(output, drawn, logits)


@pytest.mark.parametrize(
    "args",
    [
        {"max_num_seqs": 1, "threads": 1},
        {"max_num_batched_tokens": 13},
        {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 19},
        {"num_gpu_blocks_override": 44, "preemption_mode": "swap"},
        {"enable_prefix_caching": False, "max_loras": 1},
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    prompts, wanted = PROMPTS * 2, bits(expected) * 2
    if "max_num_batched_tokens" in args:  # in whose steps the long sound has no room
        prompts, wanted = ([*each[:1], *each[2:5], *each[5:6], *each[7:]] for each in (prompts, wanted))
    assert bits(generate(path, prompts, **{**ARGS, **args})) == wanted


def test_the_release_is_the_model_of_transformers_layout(tmp_path: Path, expected: list[RequestOutput]) -> None:
    path = as_released(made(tmp_path))
    assert bits(generate(path, PROMPTS, **ARGS)) == bits(expected)


def test_sounds_that_are_too_short_too_long_or_too_many_are_refused_and_harm_nobody(
    path: Path, expected: list[RequestOutput]
) -> None:
    given: list[Any] = [np.zeros(399, np.float32), np.zeros(int(MOST_S * RATE) + 1, np.float32), [tone(0.4)] * 5]
    given.append(tone(50.0))
    refused: list[Any] = [
        {"prompt": "<video> " * (len(each) if isinstance(each, list) else 1), "multi_modal_data": {"audio": each}}
        for each in given
    ]
    *found, last = generate(path, [*refused, PROMPTS[0]], **ARGS)
    assert bits([last]) == bits(expected[:1])
    for output, said in zip(
        found, ("lasts 0.025 s, expected at least 0.025 s", "300", "at most 4", "becomes 625 tokens"), strict=True
    ):
        assert output.error is not None
        assert said in output.error.message


def test_kinds_are_left_out_by_their_limits(path: Path, expected: list[RequestOutput]) -> None:
    heard, *_, seen, text = generate(path, [PROMPTS[0], PROMPTS[2], PROMPTS[4]], limit_mm_per_prompt={"audio": 0})
    assert [each.error is None for each in (heard, seen, text)] == [False, False, True]
    heard, seen, text = generate(path, [PROMPTS[0], PROMPTS[2], PROMPTS[4]], limit_mm_per_prompt={"image": 0}, **ARGS)
    assert [each.error is None for each in (heard, seen, text)] == [True, False, True]
    assert bits([heard, text]) == bits([expected[0], expected[4]])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_size": 18}, "chunk_size is 18, expected -1"),
        ({"downsample_rate": 2}, "downsample_rate is 2, expected 1"),
        ({"time_reduction": 6}, "time_reduction is 6, expected a power of 2"),
        ({"ext_pw_out_channel": 24}, "ext_pw_out_channel is 24, expected hidden_size, which is 16"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_an_encoder_that_no_release_has_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = make_vision_checkpoint("phi4_multimodal", tmp_path)
    audio = json.loads((path / "config.json").read_text())["audio_config"]
    edit_config(path, audio_config={**audio, **changes})
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        generate(path, ["w1"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"audio_compression_rate": 4}, "audio_compression_rate is 4, expected 8"),
        ({"feature_size": 40}, "feature_size is 40, expected 80"),
        ({"win_length": 600}, "win_length is 600, expected at most n_fft, which is 512"),
        ({"n_fft": 1 << 20}, "n_fft is 1048576, expected at most 4,096"),
    ],
)
def test_settings_of_sounds_with_which_none_is_read_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    path = make_vision_checkpoint("phi4_multimodal", tmp_path)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises((CheckpointError, UnsupportedModel), match=said):
        generate(path, ["w1"])
