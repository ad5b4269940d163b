"""The two shapes of log-probabilities."""

from __future__ import annotations

import pytest

from octavo.core.outputs import Logprob
from octavo.server.logprobs import chat_logprobs, completion_logprobs, token_text

POSITION = {7: Logprob(-3.0, 9, "x"), 2: Logprob(-2.0, 2, "b"), 1: Logprob(-1.0, 1, "a")}


def test_likeliest_come_in_order_and_no_more_than_asked_for() -> None:
    (token,) = chat_logprobs([7], [POSITION], 2, {1: b"a", 2: b"b", 7: b"x"}.get).content
    assert (token.token, token.logprob, token.bytes) == ("x", -3.0, (120,))
    assert [(top.token, top.bytes) for top in token.top_logprobs] == [("a", (97,)), ("b", (98,))]


def test_every_token_of_a_character_has_its_bytes_where_they_are_known() -> None:
    position = {1: Logprob(-1.0, 1, "\ufffd"), 2: Logprob(-1.0, 1, "\ufffd")}
    content = chat_logprobs([1, 2, 1], [position] * 3, 0, {1: b"\xc3", 2: b"\xa9"}.get).content
    assert [token.bytes for token in content] == [(0xC3,), (0xA9,), (0xC3,)]
    assert chat_logprobs([1], [position], 0, lambda _: None).content[0].bytes is None


def test_drawn_token_is_among_the_top_ones_of_a_completion() -> None:
    logprobs = completion_logprobs(["x"], [7], [POSITION], 1, [4])
    assert (logprobs.top_logprobs, logprobs.text_offset) == ([{"a": -1.0, "x": -3.0}], [4])


def test_of_two_tokens_with_one_text_the_likelier_is_listed() -> None:
    position = {1: Logprob(-1.0, 1, "a"), 2: Logprob(-2.0, 2, "a")}
    assert completion_logprobs(["a"], [2], [position], 2, [0]).top_logprobs == [{"a": -1.0}]


def test_a_token_without_text_is_listed_by_its_id() -> None:
    assert token_text(5, {5: Logprob(-1.0, 1, None)}) == "token_id:5"
    assert token_text(5, None) == "token_id:5"


def test_tokens_and_positions_belong_together() -> None:
    with pytest.raises(ValueError, match="zip"):
        chat_logprobs([7, 7], [POSITION], 0, lambda _: None)


def test_minus_one_shows_all_that_there_are() -> None:
    position = {number: Logprob(-number, number, str(number)) for number in range(1, 4)}
    [content] = chat_logprobs([2], [position], -1, lambda _: b"").content
    assert [each.token for each in content.top_logprobs] == ["1", "2", "3"]
