"""Models that read sounds in the place of tokens: what transformers computes, and `==` for any schedule."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.core.outputs import RequestOutput
from tests.e2e.test_images import PARAMS, bits, generate
from tests.fakes.hearing import AUDIO, extractor, make_hearing_checkpoint
from tests.fakes.vision import load_vision_oracle
from tests.fakes.whisper import tone

pytestmark = pytest.mark.slow

RATE = 16_000
SOUNDS = [tone(1.3, 440.0), tone(2.0, 300.0), tone(0.4, 520.0)]
PROMPTS: list[Any] = [
    {"prompt": "w1 <start> <image> <end> w2", "multi_modal_data": {"audio": (SOUNDS[0], RATE)}},
    {"prompt": "<image> w2 <image> w7", "multi_modal_data": {"audio": [(SOUNDS[1], RATE), (SOUNDS[2], RATE)]}},
    "w1 w2 w3",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_checkpoint(tmp_path_factory.mktemp("hearing"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS)


def test_log_probabilities_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    oracle = load_vision_oracle(path, "Qwen2AudioForConditionalGeneration")
    for prompt, output in zip(PROMPTS[:2], expected, strict=False):
        given = prompt["multi_modal_data"]["audio"]
        sounds = [each for each, _ in (given if isinstance(given, list) else [given])]
        made = extractor()(
            sounds, sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        (completion,) = output.outputs
        drawn = list(completion.token_ids)
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        assert AUDIO not in drawn
        with torch.inference_mode():
            logits = oracle(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                input_features=made["input_features"],
                feature_attention_mask=made["attention_mask"],
            ).logits[0]
        wanted = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        assert wanted.argmax(-1).tolist() == drawn
        for row, found in zip(wanted, completion.logprobs or [], strict=True):
            for token_id, each in found.items():
                assert abs(each.logprob - float(row[token_id])) <= 1e-5 * max(1.0, float(logits.abs().max()))


@pytest.mark.parametrize(
    "args",
    [
        {"max_num_batched_tokens": 5},
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 19},
        {"num_gpu_blocks_override": 10, "preemption_mode": "swap"},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
    ],
    ids=str,
)
def test_the_same_bits_however_requests_are_computed(
    path: Path, expected: list[RequestOutput], args: dict[str, Any]
) -> None:
    assert bits(generate(path, PROMPTS * 2, **args)) == bits(expected) * 2


def test_a_sound_of_a_message_is_the_sound_of_the_prompt(path: Path) -> None:
    file = io.BytesIO()
    samples = (SOUNDS[2] * 32767).round().astype(np.int16)
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    template = (
        "{% for message in messages %}{% for part in message.content %}"
        "{{ '<image>' if part.type == 'audio' else part.text }} {% endfor %}{% endfor %}"
    )
    llm = LLM(str(path), dtype="float32", num_gpu_blocks_override=64, chat_template=template)
    try:
        sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        content = [sound, {"type": "text", "text": "w5"}]
        (chatted,) = llm.chat([{"role": "user", "content": content}], PARAMS)
        prompt = {"prompt": "<image> w5", "multi_modal_data": {"audio": (samples / np.float32(32768), RATE)}}
        (plain, again) = (llm.generate([prompt], PARAMS)[0] for _ in range(2))
        assert chatted.prompt_token_ids == plain.prompt_token_ids
        assert bits([chatted]) == bits([plain]) == bits([again])
        assert again.num_cached_tokens > 0
        others: list[tuple[Any, str]] = [
            ({"audio": (tone(2.5, 1.0), RATE)}, "lasts 2.5 s or more, expected at most 2 s; send it in parts"),
            ({}, "1 placeholder for sounds, but 0 sounds came"),
            ({"image": [1]}, "this model reads text and sounds"),
        ]
        for given, message in others:
            (refused,) = llm.generate([{"prompt": "<image>", "multi_modal_data": given}], PARAMS)
            assert message in str(refused.error), refused.error
    finally:
        llm.close()


def test_limits_of_sounds_are_their_own(path: Path, expected: list[RequestOutput]) -> None:
    assert bits(generate(path, PROMPTS, limit_mm_per_prompt={"image": 0, "audio": 2})) == bits(expected)
    (refused,) = generate(path, PROMPTS[1:2], limit_mm_per_prompt={"audio": 1})
    assert "has 2 sounds, must have at most 1" in str(refused.error)
    refused, text = generate(path, PROMPTS[::2], limit_mm_per_prompt={"audio": 0})
    assert "this model reads text alone" in str(refused.error)
    assert bits([text]) == bits(expected[2:])
