"""Two GGUF files compute, bit by bit, what the checkpoint computes that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.fakes.mmproj_files import FAMILIES, convert_both, make_released
from tests.fakes.vision import image

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
PROMPTS: list[Any] = [
    {"prompt": "w1 <image> w2 w3", "multi_modal_data": {"image": image(0)}},
    {"prompt": "w1 <image> w2 <image> w7", "multi_modal_data": {"image": [image(1, 70, 90), image(0)]}},
    {"prompt": "<image> w5", "multi_modal_data": {"image": [image(2, 300, 200)]}},
    "w1 w2 w3",
]


def generate(path: Path, tokenizer: Path, prompts: list[Any] = PROMPTS, **args: Any) -> list[Any]:
    llm = LLM(str(path), tokenizer=str(tokenizer), num_gpu_blocks_override=64, max_num_seqs=4, **args)
    try:
        found = llm.generate(prompts, PARAMS)
    finally:
        llm.close()
    return [(each.prompt_token_ids, [(one.token_ids, one.logprobs) for one in each.outputs]) for each in found]


@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma3", "float16"), *((family, "float32") for family in sorted(FAMILIES))]
)
def test_two_files_compute_what_the_checkpoint_does(family: str, dtype: str, tmp_path: Path) -> None:
    path = make_released(family, tmp_path / "m")
    text, _ = convert_both(path, family)
    assert generate(text, path, dtype=dtype) == generate(path, path, dtype=dtype)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_without_images_the_text_model_computes_what_the_checkpoint_does(family: str, tmp_path: Path) -> None:
    path, args = make_released(family, tmp_path / "m"), {"dtype": "float32", "limit_mm_per_prompt": {"image": 0}}
    text, encoder = convert_both(path, family)
    expected = generate(path, path, PROMPTS[-1:], **args)
    assert generate(text, path, PROMPTS[-1:], **args) == expected
    encoder.unlink()
    assert generate(text, path, PROMPTS[-1:], dtype="float32") == expected


def test_a_file_elsewhere_is_named(tmp_path: Path) -> None:
    path = make_released("smolvlm", tmp_path / "m")
    text, encoder = convert_both(path, "smolvlm")
    found = generate(text, path)
    assert generate(text, path, mmproj=str(encoder.rename(tmp_path / "encoder.gguf"))) == found
