"""Gemma 3n reads images and sounds: what transformers computes, and `==` for any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.outputs import RequestOutput
from tests.e2e.test_images import PARAMS, assert_agrees, bits, generate
from tests.fakes.hearing import GEMMA3N, make_hearing_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, load_vision_oracle
from tests.fakes.whisper import RATE, tone

pytestmark = pytest.mark.slow

IMAGE, SOUND, FIRST_OF_IMAGES = "w78", "w92", 100
"""The words for tokens 101 and 115, and the first token of the encoders' tables, in which transformers looks it up."""
PROMPTS: list[Any] = [
    {
        "prompt": f"w1 {SOUND} w3 {IMAGE} {SOUND} w4",
        "multi_modal_data": {"audio": [(tone(2.37), RATE), (tone(0.4, 520.0), RATE)], "image": image(0)},
    },
    {"prompt": f"{IMAGE} {IMAGE} w5", "multi_modal_data": {"image": [image(1, 70, 90), image(2, 30, 40)]}},
    {"prompt": f"w5 {SOUND}", "multi_modal_data": {"audio": (tone(3.2, 300.0), RATE)}},
    "w1 w2 w3",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_checkpoint("gemma3n", tmp_path_factory.mktemp("gemma3n"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS)


def listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def test_logprobs_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    processors = GEMMA3N["gemma3n"][0]()[1]
    oracle = load_vision_oracle(path, "Gemma3nForConditionalGeneration")
    for prompt, output in zip(PROMPTS, expected, strict=True):
        given = prompt["multi_modal_data"] if isinstance(prompt, dict) else {}
        inputs: dict[str, Any] = {}
        if "image" in given:
            inputs |= processors.images(listed(given["image"]), return_tensors="pt")
        if "audio" in given:
            # one by one: transformers fills short ones up as long ones
            sounds = [processors.sounds(each, return_tensors="pt") for each, _ in listed(given["audio"])]
            longest = max(each["input_features"].shape[1] for each in sounds)
            for name in ("input_features", "input_features_mask"):
                fill = [torch.zeros(1, longest - each[name].shape[1], *each[name].shape[2:]) for each in sounds]
                parts = [
                    torch.cat([each[name], rest.to(each[name])], 1) for each, rest in zip(sounds, fill, strict=True)
                ]
                inputs[name] = torch.cat(parts)
        drawn = list(output.outputs[0].token_ids)
        drawn = drawn[: next((place for place, each in enumerate(drawn, 1) if each >= FIRST_OF_IMAGES), None)]
        with torch.inference_mode():
            logits = oracle(input_ids=torch.tensor([[*output.prompt_token_ids, *drawn]]), **inputs).logits[0]
        assert_agrees(output, drawn, logits)


@pytest.mark.parametrize(
    "args",
    [
        {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 5},
        {"num_gpu_blocks_override": 12, "preemption_mode": "swap", "threads": 2},
        {"enable_prefix_caching": False, "max_num_seqs": 1, "threads": 1},
    ],
    ids=str,
)
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    assert bits(generate(path, PROMPTS * 2, **args)) == bits(expected) * 2


def test_two_ranks_give_the_bits_of_one(path: Path, expected: list[RequestOutput]) -> None:
    with llm_of_ranks(path, 2, dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        assert bits(llm.generate(PROMPTS, PARAMS)) == bits(expected)


def test_a_sound_has_a_length_that_the_encoder_hears(path: Path) -> None:
    given = [(np.zeros(500, np.float32), RATE), (tone(3.3), RATE)]
    for sound, said in zip(given, ("lasts 0.031 s, expected at least 0.04 s", "expected at most 3.2 s"), strict=True):
        (refused,) = generate(path, [{"prompt": SOUND, "multi_modal_data": {"audio": sound}}])
        assert said in str(refused.error)
