"""The tokenizer that programs get has the methods of transformers' tokenizers, and answers as they do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from octavo.builtin import model_directory
from octavo.core.prompt import Prompt
from octavo.engine.text.chat_template import ChatOptions, ChatTemplate, Message
from octavo.engine.text.chat_tokenizer import ChatTokenizer
from octavo.engine.text.tokenizer import Tokenizer

TEXT = "Once upon a time, h\u00e9llo \u6f22"
MESSAGES: list[Message] = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def ours() -> ChatTokenizer:
    tokenizer = Tokenizer.open(model_directory())
    template = ChatTemplate.find(model_directory(), tokenizer)
    assert template is not None

    def render(messages: Any, options: ChatOptions) -> Prompt:
        used = template if options.chat_template is None else ChatTemplate(options.chat_template)
        return Prompt(used.render(messages, options), add_special_tokens=False)

    return ChatTokenizer(tokenizer, render)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_directory())


def test_texts_and_ids_are_those_of_transformers(ours: ChatTokenizer, theirs: Any) -> None:
    ids = ours.encode(TEXT)
    assert ids == theirs.encode(TEXT) == ours(TEXT)["input_ids"]
    assert ours([TEXT, "a"])["input_ids"] == [list(each) for each in theirs([TEXT, "a"])["input_ids"]]
    ended = [*ids, ours.eos_token_id]
    assert ours.decode(ended) == theirs.decode(ended) == f"{TEXT}<|im_end|>"
    assert ours.decode(ended, skip_special_tokens=True) == TEXT
    assert ours.decode(ids[0]) == theirs.decode([ids[0]])
    assert ours.batch_decode([ids, ended]) == [TEXT, f"{TEXT}<|im_end|>"]
    words = ours.convert_ids_to_tokens(ids)
    assert words == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids[0]) == words[0]
    assert ours.convert_tokens_to_ids(words) == ids
    assert ours.convert_tokens_to_ids("<|im_end|>") == ours.eos_token_id == theirs.eos_token_id
    assert ours.convert_tokens_to_ids("no such token") is None
    assert len(ours) == ours.vocab_size == len(theirs)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda ids: [*map(torch.tensor, ids)]])
def test_integers_of_any_library_are_decoded_as_by_transformers(ours: ChatTokenizer, theirs: Any, make: Any) -> None:
    ids = ours.encode(TEXT)
    given = make(ids)
    assert ours.decode(given) == theirs.decode(given) == TEXT
    assert ours.decode(given[0]) == theirs.decode(given[0])
    assert ours.decode(make([ids, ids])) == theirs.decode(np.array([ids, ids])) == [TEXT, TEXT]
    assert ours.batch_decode(make([ids, ids])) == [TEXT, TEXT]
    assert ours.convert_ids_to_tokens(given) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(given[0]) == theirs.convert_ids_to_tokens(ids[0])


@pytest.mark.parametrize("given", [1.5, [1.5], "a", np.array([1.5]), None, [None]])
def test_what_are_no_integers_is_not_decoded(ours: ChatTokenizer, given: Any) -> None:
    with pytest.raises(TypeError):
        ours.decode(given)


def test_special_tokens_are_those_of_transformers(ours: ChatTokenizer, theirs: Any) -> None:
    assert (ours.eos_token, ours.pad_token, ours.unk_token) == (theirs.eos_token, theirs.pad_token, theirs.unk_token)
    assert (ours.pad_token_id, ours.unk_token_id) == (theirs.pad_token_id, None)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"tools": TOOLS, "add_generation_prompt": True},
        {"continue_final_message": True},
        {"enable_thinking": False, "add_generation_prompt": True},
    ],
)
def test_conversations_become_the_text_and_the_ids_of_transformers(
    ours: ChatTokenizer, theirs: Any, options: dict[str, Any]
) -> None:
    text = ours.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    ids = theirs.apply_chat_template(MESSAGES, return_dict=False, **options)
    assert ours.apply_chat_template(MESSAGES, **options) == ids
    assert ours.apply_chat_template(MESSAGES, return_dict=True, **options) == {"input_ids": ids}
    assert ours.apply_chat_template([MESSAGES, MESSAGES[:1]], **options)[0] == ids


def test_a_template_and_its_values_can_be_given(ours: ChatTokenizer) -> None:
    template = "{{ greeting }}, {{ messages[0].content }}"
    made = ours.apply_chat_template(MESSAGES, tokenize=False, chat_template=template, greeting="Hello")
    assert made == "Hello, Who are you?"
