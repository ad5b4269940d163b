"""Mistral's tokenizer files cut texts and render chats as mistral_common does, and serve grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.text.chat_template import ChatOptions, ChatTemplate
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError, InvalidRequest
from octavo.structured_output.matchers import Matchers
from tests.fakes.tekken import NUM_SPECIAL, SPECIAL, VOCABULARY, WORDS, write_tekken

FIRST_WORD = NUM_SPECIAL + 256


def word(text: str) -> int:
    return FIRST_WORD + WORDS.index(text)


def test_texts_are_cut_by_the_ranks_of_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_tekken(tmp_path))
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.encode("hello") == [1, word("hello")]
    # by their ranks he comes before ll, and hell before lo
    expected = [word(" w"), *(NUM_SPECIAL + byte for byte in b"x"), word("hell"), NUM_SPECIAL + ord("p"), 4]
    assert tokenizer.encode(" wxhellp[/INST]", add_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("hello é[/INST]")) == "hello é"
    assert tokenizer.token_id(f"<SPECIAL_{len(SPECIAL)}>") == len(SPECIAL)
    assert tokenizer.token_id("spare") is None
    assert Tokenizer.open(tmp_path / "tekken.json").encode("hello") == [1, word("hello")]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
CHATS: list[tuple[list[dict[str, Any]], Any, str]] = [
    (
        [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo"},
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        ],
        None,
        "<s>[SYSTEM_PROMPT]Be.[/SYSTEM_PROMPT][INST]Hi[/INST]Yo</s>[INST]A\n\nB[/INST]",
    ),
    (
        [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What?"}]}],
        None,
        "<s>[INST][BEGIN_AUDIO][AUDIO]What?[/INST]",
    ),
    (
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": CALLS * 2},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
            {"role": "user", "content": "and?"},
        ],
        TOOLS,
        f"<s>[AVAILABLE_TOOLS]{json.dumps(TOOLS)}[/AVAILABLE_TOOLS][INST]Hi[/INST]"
        + '[TOOL_CALLS]f[ARGS]{"a": 1}' * 2
        + "</s>[TOOL_RESULTS]7[/TOOL_RESULTS][INST]and?[/INST]",
    ),
]


@pytest.mark.parametrize(("messages", "tools", "text"), CHATS)
def test_chats_without_a_template_are_written_as_mistral_common_writes_them(
    messages: list[dict[str, Any]], tools: Any, text: str, tmp_path: Path
) -> None:
    template = ChatTemplate.find(tmp_path, Tokenizer.open(write_tekken(tmp_path)))
    assert template is not None
    assert template.render(messages, ChatOptions(tools=tools)) == text
    older = Tokenizer.open(write_tekken(tmp_path, version="v7"))
    assert ChatTemplate.find(tmp_path, older) is None


def test_version_3_has_the_system_before_the_last_message_of_a_user(tmp_path: Path) -> None:
    template = ChatTemplate.find(tmp_path, Tokenizer.open(write_tekken(tmp_path, version="v3")))
    assert template is not None
    seen = [{"type": "image"}, {"type": "text", "text": "and?"}]
    messages = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": seen},
    ]
    expected = "<s>[INST]Hi[/INST]Yes</s>[INST]Be.\n\n[IMG]and?[/INST]"
    assert template.render(messages, ChatOptions()) == expected
    with pytest.raises(InvalidRequest, match="no messages of the role tool"):
        template.render([*messages, {"role": "tool", "content": "7"}], ChatOptions())


def test_grammars_know_the_tokens(tmp_path: Path) -> None:
    matchers = Matchers(write_tekken(tmp_path), VOCABULARY, [2])
    try:
        assert matchers.compile(StructuredOutputsParams(choice=("hello", "he"))).result()
    finally:
        matchers.close()


@pytest.mark.parametrize(
    "config",
    [
        {"default_vocab_size": VOCABULARY + 2},
        {"default_vocab_size": 1 << 40, "default_num_special_tokens": 1 << 40},
        {"default_num_special_tokens": None},
        {"pattern": "("},
    ],
    ids=str,
)
def test_damaged_files_are_named(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tekken\.json: is not a usable tokenizer"):
        Tokenizer.open(write_tekken(tmp_path, **config))
