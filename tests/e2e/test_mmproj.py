"""Two GGUF files compute, bit by bit, what the checkpoint computes that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.fakes.mmproj_files import FAMILIES, TEXT_TOKENS, convert_both, make_released
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
    prompts = PROMPTS
    if family == "llama4":
        prompts = [{**each, "prompt": each["prompt"].replace("<image>", "<|image|>")} for each in PROMPTS[:3]]
    assert generate(text, path, prompts, dtype=dtype) == generate(path, path, prompts, dtype=dtype)


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


def test_a_chat_needs_nothing_but_the_two_files(tmp_path: Path) -> None:
    """Tokenizer, template and the tokens around images are those of the text model's file."""
    template = (
        "{{ bos_token }}{% for each in messages[0].content %}"
        "{% if each.type == 'image' %}<start_of_image>{% else %}{{ each.text }}{% endif %}{% endfor %}"
    )
    pieces = ["<pad>", "</s>", "<s>", "<unk>", *TEXT_TOKENS["gemma3"].values(), "▁", "\n", "\n\n", *"abcdefgh"]
    tokens = [*pieces, *(f"<unused{number}>" for number in range(128 - len(pieces)))]
    own = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [3 if token.startswith("<") else 1 for token in tokens],
        "scores": [-float(number) for number in range(len(tokens))],
        "unknown_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    path = make_released("gemma3", tmp_path / "m")
    named = {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    text, _ = convert_both(path, "gemma3", tokenizer={**named, "tokenizer.chat_template": template})
    llm = LLM(str(text), num_gpu_blocks_override=64)
    try:
        parts = [{"type": "text", "text": "ab"}, {"type": "image", "image": image(0)}, {"type": "text", "text": "c"}]
        [output] = llm.chat([{"role": "user", "content": parts}], PARAMS)
    finally:
        llm.close()
    begin, end, vector = map(tokens.index, TEXT_TOKENS["gemma3"].values())
    a, b, c, lines = map(tokens.index, ("a", "b", "c", "\n\n"))
    assert output.prompt_token_ids == [2, a, b, lines, begin, *[vector] * 16, end, lines, c]
    assert len(output.outputs[0].token_ids) == 6


def test_a_template_for_text_alone_has_images_where_they_are_in_the_content(tmp_path: Path) -> None:
    """As templates of InternVL's files are: they join the content to other text, and know nothing of images."""
    path = make_released("internvl", tmp_path / "m")
    text, _ = convert_both(path, "internvl")
    template = "{% for m in messages %}{{ 'w5 ' + m.content + ' w6 ' }}{% endfor %}"
    parts = [{"type": "text", "text": "w1"}, {"type": "image", "image": image(0)}, {"type": "text", "text": "<image>"}]
    llm = LLM(str(text), tokenizer=str(path), num_gpu_blocks_override=64, chat_template=template)
    try:
        [found] = llm.chat([{"role": "user", "content": parts}], PARAMS)
        prompt = {"prompt": "w5 w1 <image> w7 w6", "multi_modal_data": {"image": image(0)}}
        [expected] = llm.generate([prompt], PARAMS)
    finally:
        llm.close()
    assert found.error is None
    begin = expected.prompt_token_ids.index(11) + 1  # </img>
    assert found.prompt_token_ids[:begin] == expected.prompt_token_ids[:begin]
    assert 4 not in found.prompt_token_ids[begin:]  # what a message spells is no image
