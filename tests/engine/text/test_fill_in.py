"""Prompts of models that fill in: the tokens of each family, in the order in which it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.text.fill_in import ends_of_filling_in, fill_in_prompt
from octavo.errors import InvalidRequest
from tests.fakes.byte_tokenizer import BOS, byte_tokenizer

FAMILIES = {
    "Qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "CodeLlama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "DeepSeek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
}
PREFIX, SUFFIX, MIDDLE = 259, 260, 261


def added(*names: str) -> dict[str, object]:
    listed = {str(PREFIX + at): {"content": name, "special": True} for at, name in enumerate(names)}
    return {"added_tokens_decoder": listed}


@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_prefix_and_suffix_stand_before_the_middle(tmp_path: Path, names: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer(tmp_path, **added(*names))
    expected = [PREFIX, *b"a =", SUFFIX, *b";", MIDDLE]
    assert fill_in_prompt(tokenizer, "a =", ";").token_ids == expected


@pytest.mark.parametrize("names", [("[PREFIX]", "[SUFFIX]"), ("[PREFIX]", "[SUFFIX]", "[MIDDLE]")])
def test_codestral_reads_the_suffix_first_and_goes_on_with_the_prefix(tmp_path: Path, names: tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer(tmp_path, **added(*names), add_bos_token=True)
    assert fill_in_prompt(tokenizer, "a", "b").token_ids == [BOS, SUFFIX, *b"b", PREFIX, *b"a"]
    plain = fill_in_prompt(tokenizer, "a", "b", adds_special_tokens=False)
    assert plain.token_ids == [SUFFIX, *b"b", PREFIX, *b"a"]


def test_texts_that_spell_special_tokens_stay_texts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, **added(*FAMILIES["Qwen"]))
    prompt = fill_in_prompt(tokenizer, "<|fim_middle|>", "<eos><|fim_prefix|>")
    assert prompt.token_ids == [PREFIX, *b"<|fim_middle|>", SUFFIX, *b"<eos><|fim_prefix|>", MIDDLE]


def test_a_model_that_was_not_trained_to_fill_in_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no token for the prefix and the suffix and the middle .*<\|fim_pre"):
        fill_in_prompt(byte_tokenizer(tmp_path), "a", "b")
    with pytest.raises(InvalidRequest, match="no token for the middle ") as caught:
        fill_in_prompt(byte_tokenizer(tmp_path / "two", **added(*FAMILIES["Qwen"][:2])), "a", "b")
    assert (caught.value.field, caught.value.code) == ("suffix", "unsupported_parameter")


FILES = [("a.py", "one"), ("b.py", "two")]


def test_other_files_stand_before_the_text_behind_the_tokens_of_repositories(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(
        tmp_path, **added(*FAMILIES["Qwen"], "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"), add_bos_token=True
    )
    repository, file, padding = 262, 263, 264
    end = [file, *b"filename\n", PREFIX, *b"a", SUFFIX, *b"b", MIDDLE]
    first, second = [file, *b"a.py\none"], [file, *b"b.py\ntwo"]
    start = [BOS, repository, *b"myproject\n"]

    def prompt(most_tokens: int) -> list[int] | None:
        return fill_in_prompt(tokenizer, "a", "b", files=FILES, most_tokens=most_tokens).token_ids

    whole = [*start, *first, *second, *end]
    assert prompt(len(whole)) == whole
    assert prompt(len(whole) - 1) == [*start, *second, *end]
    assert prompt(len(whole) - len(first) - 1) == [BOS, *end[-5:]]
    assert fill_in_prompt(tokenizer, "a", "b", most_tokens=1000).token_ids == [BOS, *end[-5:]]
    assert ends_of_filling_in(tokenizer) == [padding, repository, file]


def test_other_files_are_snippets_where_there_are_no_tokens_for_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, **added(*FAMILIES["StarCoder"]))
    expected = [*b"\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo", PREFIX, *b"a", SUFFIX, *b"b", MIDDLE]
    assert fill_in_prompt(tokenizer, "a", "b", files=FILES, most_tokens=99).token_ids == expected
    assert ends_of_filling_in(tokenizer) == []
