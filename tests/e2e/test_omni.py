"""Models that read images, videos and sounds: what transformers computes, and `==` for any schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.outputs import RequestOutput
from tests.e2e.test_images import assert_agrees, bits, generate
from tests.e2e.test_videos import arrays_of
from tests.fakes.hearing import ALL_KINDS, extractor, make_hearing_checkpoint
from tests.fakes.vision import image, load_vision_oracle
from tests.fakes.whisper import RATE, tone

pytestmark = pytest.mark.slow

FRAMES = [image(seed, 112, 56) for seed in range(5)]
SOUND = "</img> <img> <global-img>"
PROMPTS: list[Any] = [
    {
        "prompt": f"w1 <start> <image> <end> w3 {SOUND} w4 <start> <video> <end> w5 {SOUND} w6",
        "multi_modal_data": {
            "audio": [(tone(2.37), RATE), (tone(0.4, 520.0), RATE)],
            "image": image(0),
            "video": (FRAMES, {"fps": 2.5}),
        },
    },
    # alone, because transformers fills a short sound up where there are longer ones
    {"prompt": f"{SOUND} w4", "multi_modal_data": {"audio": (tone(0.43), RATE)}},
    "w1 w2 w3",
]


@pytest.fixture(scope="module", params=sorted(ALL_KINDS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[RequestOutput]:
    return generate(path, PROMPTS, num_gpu_blocks_override=128)


def heard(path: Path, sounds: list[Any]) -> dict[str, torch.Tensor]:
    """What transformers' processor makes of sounds."""
    options = {"sampling_rate": RATE, "return_attention_mask": True, "truncation": False, "return_tensors": "pt"}
    options |= {"padding": "max_length", "max_length": 3 * RATE} if "qwen2_5" in path.name else {"padding": True}
    each = [extractor()(sound, **options) for sound in sounds]
    longest = max(one["input_features"].shape[-1] for one in each)
    features, mask = (
        torch.cat([torch.nn.functional.pad(one[name], (0, longest - one[name].shape[-1])) for one in each])
        for name in ("input_features", "attention_mask")
    )
    return {"input_features": features, "feature_attention_mask": mask}


def test_logprobs_are_those_of_transformers(path: Path, expected: list[RequestOutput]) -> None:
    oracle = load_vision_oracle(path, ALL_KINDS[path.name[:-1]][1].replace("For", "ThinkerFor", 1))
    for prompt, output in zip(PROMPTS[:2], expected, strict=False):
        given = prompt["multi_modal_data"]
        sounds = [each for each, _ in (given["audio"] if isinstance(given["audio"], list) else [given["audio"]])]
        inputs = heard(path, sounds)
        if "image" in given:
            seen = {name: each for name, each in given.items() if name != "audio"}
            inputs |= arrays_of(path, {"multi_modal_data": seen}) | {"video_second_per_grid": torch.tensor([2 / 2.5])}
        drawn = list(output.outputs[0].token_ids)
        ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
        with torch.inference_mode():
            logits = oracle(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
        assert_agrees(output, drawn, logits)


@pytest.mark.parametrize(
    "args",
    [{"max_num_batched_tokens": 5}, {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 19, "max_num_seqs": 2}],
    ids=str,
)
def test_the_same_bits_in_any_schedule(path: Path, expected: list[RequestOutput], args: dict[str, Any]) -> None:
    assert bits(generate(path, PROMPTS * 2, **args)) == bits(expected) * 2


def test_kinds_are_left_out_by_their_limits(path: Path, expected: list[RequestOutput]) -> None:
    silent, *others = generate(path, PROMPTS, limit_mm_per_prompt={"image": 0, "video": 0})
    assert "this model reads text and sounds" in str(silent.error)
    assert bits(others) == bits(expected[1:])


def test_wrong_values_are_refused_by_their_place_in_the_file(path: Path, tmp_path: Path) -> None:
    from octavo.config.checkpoint import Checkpoint
    from octavo.config.media.sounds import sound_section
    from octavo.errors import CheckpointError

    config = json.loads((path / "config.json").read_text())
    config["thinker_config"]["audio_config"]["d_model"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"thinker_config\.audio_config\.d_model is 0"):
        sound_section(Checkpoint.open(tmp_path))
    given = {"thinker_config": {"audio_config": {"d_model": -1}}}
    with pytest.raises(CheckpointError, match=r"--hf-overrides .* thinker_config\.audio_config\.d_model is -1"):
        sound_section(Checkpoint.open(tmp_path, given))
