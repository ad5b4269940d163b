"""VibeVoice ASR reads samples of one loudness, without noise, and is told how long they last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.config.released.vibevoice import vibevoice_sounds
from octavo.config.section import Section
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError, InvalidRequest
from octavo.multimodal.processors.levelled_sound import LevelledSamples
from tests.e2e.test_images import assert_agrees, bits, generate
from tests.fakes.hearing import AUDIO, HOURS, make_hearing_checkpoint
from tests.fakes.vision import load_vision_oracle
from tests.fakes.whisper import tone

pytestmark = pytest.mark.slow

FAMILY, RATE = "vibevoice_asr", 24_000
SOUND, LOUD = tone(2.3, 440.0)[: 2 * 16_000], np.sign(tone(0.3, 520.0)).astype(np.float32)
PROMPTS: list[Any] = [
    {"prompt": "w1 <start> <image> <end> w2", "multi_modal_data": {"audio": (SOUND, RATE)}},
    {"prompt": "<image> w2 <image> w7", "multi_modal_data": {"audio": [(LOUD, RATE), (SOUND[:5000], RATE)]}},
    "w1 w2 w3",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_checkpoint(FAMILY, tmp_path_factory.mktemp(FAMILY))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS)


def test_logprobs_are_those_of_transformers_without_noise(path: Path, expected: list[RequestOutput]) -> None:
    oracle, make = load_vision_oracle(path, HOURS[FAMILY][1]), HOURS[FAMILY][0]()[1]
    for prompt, output in zip(PROMPTS[:2], expected, strict=False):
        given = prompt["multi_modal_data"]["audio"]
        sounds = [each for each, _ in (given if isinstance(given, list) else [given])]
        inputs = make(sounds, sampling_rate=RATE)
        drawn = list(output.outputs[0].token_ids)
        drawn = drawn[: drawn.index(AUDIO)] if AUDIO in drawn else drawn
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, attention_mask=torch.ones_like(ids), sample=False, **inputs).logits[0]
        assert_agrees(output, drawn, logits)


def test_samples_are_those_of_the_feature_extractor(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    section = checkpoint.stored.section("acoustic_tokenizer_encoder_config")
    assert section is not None
    settings, make = LevelledSamples.of(checkpoint, section), HOURS[FAMILY][0]()[1]
    for sound in (SOUND, LOUD):
        (want,) = make([sound.copy()], sampling_rate=RATE)["input_values"].numpy()
        np.testing.assert_allclose(settings.features(sound), want, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("args", [{"max_num_batched_tokens": 19}, {"enable_prefix_caching": False, "max_num_seqs": 1}])
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    assert bits(generate(path, PROMPTS * 2, **args)) == bits(expected) * 2


@pytest.mark.long
def test_a_template_is_told_how_long_a_sound_lasts(path: Path) -> None:
    template = "{% for part in messages[0].content %}{{ '<image> w<|AUDIO_DURATION|> ' if part.type == 'audio' }}"
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=64, chat_template=f"{template}{{% endfor %}}")
    with llm:
        seconds = np.zeros(7 * RATE, np.float32)
        prompt = llm.engine.input.render_chat([{"role": "user", "content": [{"type": "audio", "audio": seconds}]}])
        assert llm.engine.input.media.spelled(prompt).text == "<image> w7.00 "
        with pytest.raises(InvalidRequest, match="expected at most"):
            llm.engine.input.media.spelled(
                prompt.__class__(text=prompt.text, multi_modal_data={"audio": ([0.0] * 3_600_000, 1000)})
            )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"downsampling_ratios": [2, 0]}, "downsampling_ratios is .2, 0., expected integers from 1 to 999"),
        ({"downsampling_ratios": [2, 3]}, "downsampling_ratios .*, expected a product of 6, as the other encoder has"),
        ({"num_filters": 0}, "num_filters is 0"),
        ({"depths": [3, 10**9]}, "depths is .*, expected integers from 1 to 1,024"),
        ({"depths": [3] * 400}, "depths is .*, expected at most 1,024 layers together"),
    ],
)
def test_encoders_that_cannot_be_are_refused(changes: dict[str, Any], said: str, path: Path) -> None:
    values = json.loads((path / "config.json").read_text())
    values["acoustic_tokenizer_encoder_config"] |= changes
    with pytest.raises(CheckpointError, match=said):
        vibevoice_sounds(Section(values, "config.json"))
