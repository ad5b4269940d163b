"""Gemma 3n and Gemma 4 read images and sounds: what transformers computes, and `==` for any schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.core.outputs import RequestOutput
from octavo.errors import CheckpointError
from octavo.multimodal.image_prompts import ImagePrompts
from tests.e2e.test_images import PARAMS, assert_agrees, bits, generate
from tests.fakes.hearing import GEMMAS, make_hearing_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint
from tests.fakes.vision_sizes import IMAGE as IMAGE_TOKEN
from tests.fakes.whisper import RATE, tone

pytestmark = pytest.mark.slow

FIRST_OF_IMAGES = 100
"""The first token of the encoders' tables of Gemma 3n, in which transformers looks it up."""


def prompts_of(path: Path) -> list[Any]:
    """The words for the tokens of images and sounds differ."""
    image_word, sound_word = ("w78", "w92") if "gemma3n" in path.name else ("<image>", "<img>")
    words = {IMAGE: image_word, SOUND: sound_word}

    def written(prompt: str) -> str:
        return " ".join(words.get(word, word) for word in prompt.split())

    return [{**each, "prompt": written(each["prompt"])} if isinstance(each, dict) else each for each in PROMPTS]


IMAGE, SOUND = "IMAGE", "SOUND"
PROMPTS: list[Any] = [
    {
        "prompt": f"w1 {SOUND} w3 {IMAGE} {SOUND} w4",
        "multi_modal_data": {"audio": [(tone(2.37), RATE), (tone(0.4, 520.0), RATE)], "image": image(0)},
    },
    {"prompt": f"{IMAGE} {IMAGE} w5", "multi_modal_data": {"image": [image(1, 70, 90), image(2, 30, 40)]}},
    {"prompt": f"w5 {SOUND}", "multi_modal_data": {"audio": (tone(3.2, 300.0), RATE)}},
    "w1 w2 w3",
]


@pytest.fixture(scope="module", params=sorted(GEMMAS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, prompts_of(path), num_gpu_blocks_override=96)


def masks_of(oracle: Any, ids: torch.Tensor, kinds: torch.Tensor) -> Any:
    """The masks with which transformers generates: in `forward` transformers 5.24 lets tokens of an image see all of it
    in layers without a window, too."""
    return oracle.create_masks_for_generate(
        oracle.config,
        inputs_embeds=oracle.get_input_embeddings()(ids),
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=kinds,
    )


def listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def test_logprobs_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    make, architecture = GEMMAS[path.name[:-1]]
    processors, oracle = make()[1], load_vision_oracle(path, architecture)
    for prompt, output in zip(prompts_of(path), expected, strict=True):
        given = prompt["multi_modal_data"] if isinstance(prompt, dict) else {}
        inputs: dict[str, Any] = {}
        if "image" in given:
            inputs |= processors.images(listed(given["image"]), return_tensors="pt")
        if "audio" in given:
            # one by one: transformers fills short ones up as long ones
            sounds = [processors.sounds([each], return_tensors="pt") for each, _ in listed(given["audio"])]
            longest = max(each["input_features"].shape[1] for each in sounds)
            for name in ("input_features", "input_features_mask"):
                fill = [torch.zeros(1, longest - each[name].shape[1], *each[name].shape[2:]) for each in sounds]
                parts = [
                    torch.cat([each[name], rest.to(each[name])], 1) for each, rest in zip(sounds, fill, strict=True)
                ]
                inputs[name] = torch.cat(parts)
        drawn = list(output.outputs[0].token_ids)
        drawn = drawn[: next((place for place, each in enumerate(drawn, 1) if each >= FIRST_OF_IMAGES), None)]
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        if "image_position_ids" in inputs:  # tokens of an image see all of it
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
            if "unified" in path.name:
                inputs["attention_mask"] = masks_of(oracle, ids, inputs["mm_token_type_ids"])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, **inputs).logits[0]
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
    if "max_num_batched_tokens" in args and "gemma4" in path.name:
        args = {**args, "max_num_batched_tokens": 64}  # tokens of an image see all of it: they are computed together
    assert bits(generate(path, prompts_of(path) * 2, **args)) == bits(expected) * 2


def test_patches_of_gemma_4_12b_are_pixels_of_several_of_its_processors_patches(tmp_path: Path) -> None:
    path = make_hearing_checkpoint("gemma4_unified", tmp_path)
    checkpoint, processors = Checkpoint.open(path), GEMMAS["gemma4_unified"][0]()[1]
    settings = image_settings(checkpoint)
    assert settings is not None
    reader = ImagePrompts(checkpoint, settings, lambda text: [], {"image": 4, "video": 0})
    for number, size in enumerate(((84, 56), (30, 40), (9, 300), (700, 20))):
        found, expected = reader.arrays(image(number, *size)), processors.images([image(number, *size)], "pt")
        for name, values in expected.items():
            assert np.array_equal(found[name], values.numpy())
        assert found["num_soft_tokens_per_image"].tolist() == [int((expected["image_position_ids"] >= 0).sum()) // 2]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pooling_kernel_size", 2, "pooling_kernel_size is 2, expected that of vision_config, which is 3"),
        ("max_soft_tokens", 140, "mm_posemb_size is 70, expected at least max_soft_tokens, which is 140"),
    ],
)
def test_patches_that_gemma_4_12b_has_no_vectors_for_are_refused(
    name: str, value: int, said: str, tmp_path: Path
) -> None:
    path = make_hearing_checkpoint("gemma4_unified", tmp_path)
    config = json.loads((path / "processor_config.json").read_text())
    config["image_processor"][name] = value
    (path / "processor_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=said):
        image_settings(Checkpoint.open(path))


def test_two_ranks_give_the_bits_of_one(path: Path, expected: list[RequestOutput]) -> None:
    with llm_of_ranks(path, 2, dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        assert bits(llm.generate(prompts_of(path), PARAMS)) == bits(expected)


def test_a_model_without_an_encoder_of_sounds_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_vision_checkpoint("gemma4", tmp_path)
    (refused,) = generate(path, [{"prompt": "<img>", "multi_modal_data": {"audio": tone(1.0)}}])
    assert "and this model reads text and images" in str(refused.error)
    assert "are not read" not in caplog.text
