"""The shipped model's folder: complete, small, consistent, and in the layout that other engines load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from octavo.builtin import model_directory
from training.octavo_tiny.corpus import make_document, render_chat
from training.octavo_tiny.evaluate import continue_text, held_out_perplexity
from training.octavo_tiny.export import load_exported
from training.octavo_tiny.network import Network, NetworkShape

MIB = 2**20


def read_json(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model_directory() / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_directory() / "tokenizer.json"))


@pytest.fixture(scope="module")
def network() -> Network:
    return load_exported(model_directory())[0]


def test_the_folder_holds_a_whole_model_of_at_most_16_mib() -> None:
    files = {path.name: path.stat().st_size for path in model_directory().iterdir()}
    assert set(files) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 16 * MIB


def test_weights_are_bfloat16_tied_and_between_three_and_seven_million() -> None:
    with safe_open(model_directory() / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    assert read_json("config.json")["tie_word_embeddings"] is True
    assert 3_000_000 <= sum(tensor.numel() for tensor in tensors.values()) <= 7_000_000


def test_config_agrees_with_the_shape_of_the_training_script() -> None:
    config = read_json("config.json")
    shape = NetworkShape()
    expected = shape.hugging_face_config(
        bos=config["bos_token_id"], eos=config["eos_token_id"], pad=config["pad_token_id"]
    )
    assert config == expected
    assert config["head_dim"] % 16 == 0
    assert config["num_attention_heads"] > config["num_key_value_heads"]


def test_vocabulary_and_end_tokens_agree_across_the_files(tokenizer: Tokenizer) -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert generation["eos_token_id"] == ends
    assert config["eos_token_id"] in ends


def test_any_bytes_survive_the_shipped_tokenizer(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(1, 256))) + "日本語 🦊\t\r\n  x"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_renders_as_the_training_text_was_written() -> None:
    template = jinja2.Environment().from_string(read_json("tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "You are a friendly assistant."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi!"},
    ]
    assert template.render(messages=messages) == render_chat(messages)
    assert template.render(messages=messages[1:2], add_generation_prompt=True) == (
        "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_network_of_the_training_script_loads_the_weights_and_knows_the_held_out_text(
    network: Network, tokenizer: Tokenizer
) -> None:
    assert held_out_perplexity(network, tokenizer, "story", 4) < 2.5
    assert held_out_perplexity(network, tokenizer, "chat", 8) < 3.0


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", ["Paris"]),
        ("What is the opposite of hot?", ["cold"]),
        ("Which day comes after Monday?", ["Tuesday"]),
        ("What is a KV cache?", ["keys and values"]),
        ("Does octavo run on a GPU?", ["CPU", "This version"]),
        ("Does octavo need a GPU?", ["CPU", "This version"]),
        ("Can octavo use CUDA?", ["CPU", "This version"]),
        ("Where does octavo run?", ["CPU", "This version"]),
    ],
)
def test_a_question_is_answered_in_a_sentence_that_ends_by_itself(
    network: Network, tokenizer: Tokenizer, question: str, expected: list[str]
) -> None:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    answer = continue_text(network, tokenizer, prompt, max_tokens=120)
    assert all(each in answer for each in expected)
    assert answer.endswith(".")


def test_the_tokenizer_was_learned_from_the_generated_text(tokenizer: Tokenizer) -> None:
    text = make_document(0, 123_456, "story").text
    assert len(text) / len(tokenizer.encode(text).ids) > 3.5


def test_the_model_directory_needs_no_torch_to_be_named() -> None:
    assert isinstance(model_directory(), Path)
    source = Path(model_directory().parent / "__init__.py").read_text(encoding="utf-8")
    assert "torch" not in [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
