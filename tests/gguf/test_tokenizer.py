"""The tokenizer of a file makes the ids that the original tokenizer makes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.builtin import model_directory
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import model_facts, types_of_file
from octavo.config.resolve import resolve
from octavo.core.sampling_params import SamplingParams
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.fill_in import FillTokens, fill_in_prompt
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf.reader import read_gguf
from octavo.gguf.tokenizer import end_tokens, read_tokenizer
from octavo.llm import LLM
from octavo.platform import Platform
from octavo.simulate.model_facts import read_model_facts
from tests.fakes.gguf_files import convert, gguf_bytes, tokenizer_metadata

TEXTS = (
    "Once upon a time, there were 1234567 cats.",
    "  two spaces, a tab\tand\r\n\r\n  line ends  \n",
    "I'll, we'VE, it'S: don't!  <|endoftext|> x",
    "naïve café, ÅNGSTRÖM, Привет, 東京タワー, 안녕, 🦊👩‍👩‍👧 e\u0301",
    "def f(x):\n    return x**2 + 3.14e-10  # ok??",
    "",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """octavo-tiny as a file."""
    folder = tmp_path_factory.mktemp("tiny") / "octavo-tiny"
    shutil.copytree(model_directory(), folder)
    extra = {"tokenizer.chat_template": "{{ messages[0].content }}", "general.sampling.top_k": 7}
    ids = {f"tokenizer.ggml.{each}_token_id": getattr(Tokenizer.open(folder), f"{each}_token_id") for each in ("eos",)}
    return convert(folder, "qwen3", tokenizer_metadata(folder, pre="smollm") | extra | ids)


def test_byte_level_ids_and_texts_are_those_of_the_original(tiny: Path) -> None:
    found, original = Tokenizer.open(tiny), Tokenizer.open(model_directory())
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False)
        assert found.decode(ids) == original.decode(ids)
    assert found.eos_token_id == original.eos_token_id


def test_a_file_generates_what_its_checkpoint_does(tiny: Path) -> None:
    options = {"device": "reference", "max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32"}
    texts = []
    for model in (str(tiny), str(model_directory())):
        with LLM(model, **options) as llm:
            texts.append(
                llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
            )
    assert texts[0] == texts[1]


def test_explain_says_how_the_types_of_the_file_are_held(tmp_path: Path) -> None:
    tensors = {"a": ("F32", (2,), bytes(8)), "b": ("Q6_K", (2, 256), bytes(420))}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, tensors))
    assert types_of_file(read_gguf(path)) == "Q6_K 420 B (codes in 8 bits), F32 8 B"


def test_explain_rounds_no_activations_of_plain_weights(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    config = resolve(EngineArgs(model=str(tiny)), checkpoint, Platform.detect())
    assert "activations" not in dict(model_facts(config, checkpoint))


def test_explain_says_that_plain_weights_are_quantised_while_they_are_loaded(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    config = resolve(EngineArgs(model=str(tiny), quantization="int8"), checkpoint, Platform.detect())
    told = [value for name, value in model_facts(config, checkpoint) if name == "quantization"]
    assert told == ["int8, made while loading", "gguf, quantised while loading"]


def test_template_and_sampling_defaults_come_from_the_file(tiny: Path) -> None:
    template = ChatTemplate.find(tiny, Tokenizer.open(tiny))
    assert template is not None
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"
    assert Checkpoint.open(tiny).generation_config["top_k"] == 7


def test_an_unknown_pre_tokenizer_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    own = {"model": "gpt2", "pre": "odd", "tokens": ["a"], "token_type": [1]}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({f"tokenizer.ggml.{key}": value for key, value in own.items()}, {}))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre is 'odd', expected one of default, .*qwen2"):
        Tokenizer.open(path)


def test_a_file_without_a_tokenizer_says_how_to_name_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, {}))
    with pytest.raises(CheckpointError, match="has no tokenizer .* with the argument tokenizer"):
        Tokenizer.open(path)


@pytest.mark.parametrize(
    "names",
    [
        {"fim_pre": 2, "fim_suf": 3, "fim_mid": 4, "fim_rep": 5, "fim_sep": 6},
        {"prefix": 2, "suffix": 3, "middle": 4, "fim_rep": 5, "fim_sep": 6},
        {"prefix": 0, "suffix": 0, "middle": 0, "fim_pre": 2, "fim_suf": 3, "fim_mid": 4, "fim_rep": 5, "fim_sep": 6},
    ],
    ids=["new", "old", "both"],
)
def test_tokens_to_fill_in_are_those_that_the_file_names(tmp_path: Path, names: dict[str, int]) -> None:
    tokens = ["a", "b", "<P>", "<S>", "<M>", "<R>", "<F>"]
    own: dict[str, Any] = {"model": "gpt2", "tokens": tokens, "token_type": [1, 1, 3, 3, 3, 3, 3]}
    own |= {f"{name}_token_id": number for name, number in names.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({f"tokenizer.ggml.{key}": value for key, value in own.items()}, {}))
    tokenizer = Tokenizer.open(path)
    assert fill_in_prompt(tokenizer, "a", "b").token_ids == [2, 0, 3, 1, 4]
    tokens_to_fill_in = FillTokens.of(tokenizer)
    assert (tokens_to_fill_in.repository, tokens_to_fill_in.file) == (5, 6)


def test_the_unknown_token_is_a_special_one_and_has_no_text(tmp_path: Path) -> None:
    own: dict[str, Any] = {"model": "llama", "tokens": ["<unk>", "<s>", "a"], "token_type": [2, 3, 1]}
    own |= {"scores": [0.0, 0.0, 0.0], "unknown_token_id": 0}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({f"tokenizer.ggml.{key}": value for key, value in own.items()}, {}))
    tokenizer = Tokenizer.open(path)
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode([2, 0, 2]) == "aa"


def test_merges_of_gemma_4_are_those_of_the_file(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "a", "b", "▁", "ab", "▁a", "\n", "\n\n", "<0xC3>", "<0x9F>", "<|tool_response>"]
    own = {"model": "gemma4", "tokens": tokens, "token_type": [2, 3, *[1] * 7, 6, 6, 4], "bos_token_id": 1}
    own |= {"scores": [-1000.0] * 12, "merges": ["▁ a", "a b", "\n \n"]}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({f"tokenizer.ggml.{key}": value for key, value in own.items()}, {}))
    tokenizer = Tokenizer.open(path)
    ids = tokenizer.encode("ab ab\n\nß")
    assert [tokens[each] for each in ids] == ["<s>", "ab", "▁a", "b", "\n\n", "<0xC3>", "<0x9F>"]
    assert tokenizer.decode(ids) == "ab ab\n\nß"
    assert end_tokens(read_gguf(path)) == [11]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("falcon", "4 ½ 12", ["4", " ½", " 12"]),
        ("falcon", "a1234 b`$x", ["a", "123", "4", " b", "`$", "x"]),
        (
            "deepseek-llm",
            "Ünder\n the 12, 世界가 x",
            ["Ü", "nder", "\n", " the", " ", "1", "2", ",", " ", "世界가", " x"],
        ),
        ("deepseek-llm", "a!? \u3000b  ", ["a", "!?", " ", "\u3000", "b", "  "]),
        ("kimi-k2", "HelloWorld's 世界abc ab12345", ["Hello", "World's", " ", "世界", "abc", " ab", "123", "45"]),
        ("cohere2moe", "Hello12345 x", ["Hello", "12", "345", " x"]),
        ("kimi-k2", "x世界\n\n y!!\n", ["x", "世界", "\n\n", " y", "!!\n"]),
    ],
)
def test_a_pre_tokenizer_cuts_texts(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    own = {"model": "gpt2", "pre": pre, "tokens": ["a"], "token_type": [1]}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({f"tokenizer.ggml.{key}": value for key, value in own.items()}, {}))
    cut: Any = read_tokenizer(read_gguf(path))[0].pre_tokenizer
    assert [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)] == pieces


def test_a_simulation_says_that_the_bits_of_a_file_are_not_known(tiny: Path) -> None:
    with pytest.raises(UnsupportedModel, match="quant_method is 'gguf'.*simulate the model that it was made from"):
        read_model_facts(str(tiny))
