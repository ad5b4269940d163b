"""The tokenizer that is learned from the generated text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.octavo_tiny.corpus import SPECIAL_TOKENS, make_documents
from training.octavo_tiny.tokenizer import token_id, tokenizer_config, train_tokenizer

TEXTS = [document.text for document in make_documents(0, 0, 100)]
TOKENIZER: Tokenizer = train_tokenizer(TEXTS, vocab_size=400)


@given(st.text(max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_are_one_token_each() -> None:
    for number, token in enumerate(SPECIAL_TOKENS):
        assert TOKENIZER.encode(token).ids == [number]


def test_every_digit_is_a_token_of_its_own() -> None:
    assert TOKENIZER.encode("2048").tokens == ["2", "0", "4", "8"]


def test_a_missing_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="nothing_like_it"):
        token_id(TOKENIZER, "nothing_like_it")


def test_the_config_names_the_same_special_tokens_as_the_vocabulary() -> None:
    added = tokenizer_config(1024)["added_tokens_decoder"]
    assert {int(number): entry["content"] for number, entry in added.items()} == dict(enumerate(SPECIAL_TOKENS))
