"""Prompts in all the forms that callers write."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.prompt import EmbedsPrompt, Prompt, TextPrompt, TokensPrompt, is_single_prompt
from octavo.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", Prompt(text="text")),
        ([1, 2], Prompt(token_ids=[1, 2])),
        ((1, 2), Prompt(token_ids=[1, 2])),
        ({"prompt": "text"}, Prompt(text="text")),
        ({"prompt_token_ids": [3]}, Prompt(token_ids=[3])),
        ({"prompt_token_ids": np.array([3, 4])}, Prompt(token_ids=[3, 4])),
        ({"prompt": "text", "cache_salt": "s"}, Prompt(text="text", cache_salt="s")),
        ({"prompt_token_ids": [3], "cache_salt": None}, Prompt(token_ids=[3])),
        ({"prompt": "text", "multi_modal_uuids": {"image": "one"}}, Prompt(text="text")),
        ({"prompt": "a", "cache_namespace": "n"}, Prompt(text="a", cache_namespace="n")),
        (
            {"prompt_token_ids": [3], "cache_salt": "s", "cache_namespace": "n"},
            Prompt(token_ids=[3], cache_salt="s", cache_namespace="n"),
        ),
        (Prompt(text="a", add_special_tokens=False), Prompt(text="a", add_special_tokens=False)),
    ],
)
def test_a_prompt_has_one_normal_form(given: object, expected: Prompt) -> None:
    assert Prompt.read(given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        3,
        None,
        [1, "a"],
        [1.5],
        [True],
        {"prompt": 3},
        {"prompt": "a", "prompt_token_ids": [1]},
        {"text": "a"},
        {"cache_salt": "s"},
        {"prompt": "a", "cache_salt": 3},
        {"prompt": "a", "cache_namespace": 3},
        {},
        b"bytes",
    ],
)
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest):
        Prompt.read(given)  # type: ignore[arg-type]


def test_one_prompt_is_told_from_a_list_of_prompts() -> None:
    assert is_single_prompt("text")
    assert is_single_prompt([1, 2])
    assert is_single_prompt({"prompt": "a"})
    assert not is_single_prompt(["a", "b"])
    assert not is_single_prompt([[1], [2]])
    assert not is_single_prompt([])


def test_the_names_that_vllm_has_for_prompts_are_mappings() -> None:
    assert Prompt.read(TextPrompt(prompt="a", cache_salt="s")) == Prompt(text="a", cache_salt="s")
    assert Prompt.read(TokensPrompt(prompt_token_ids=[1, 2])) == Prompt(token_ids=[1, 2])
    embeds = EmbedsPrompt(prompt_embeds=np.zeros((2, 4), np.float32))
    assert Prompt.read(embeds) == Prompt.read({**embeds})
