"""Detokenizer and stop strings: text that comes in pieces is the text of the whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.engine.text.detokenizer import Detokenizer, SequenceText, StopStrings, text_offsets
from octavo.engine.text.tokenizer import Tokenizer
from tests.fakes.byte_tokenizer import byte_tokenizer, piece_tokenizer


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("byte"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return piece_tokenizer(tmp_path_factory.mktemp("piece"))


def all_text(detokenizer: Detokenizer, token_ids: Sequence[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()


@given(token_ids=st.lists(st.integers(0, 259), max_size=40), skip=st.booleans())
def test_pieces_join_to_the_text_of_all_ids(bytes_only: Tokenizer, token_ids: list[int], skip: bool) -> None:
    whole = bytes_only.decode(token_ids, skip_special_tokens=skip)
    assert all_text(Detokenizer(bytes_only, skip_special_tokens=skip), token_ids) == whole


@given(text=st.text(max_size=30), prompt=st.text(max_size=20))
@example(text="0", prompt="\ufffd")
def test_pieces_continue_the_text_of_the_prompt(pieces: Tokenizer, text: str, prompt: str) -> None:
    prompt_ids = pieces.encode(prompt)
    output_ids = pieces.encode(text, add_special_tokens=False)
    whole = pieces.decode(prompt_ids + output_ids)
    assert pieces.decode(prompt_ids) + all_text(Detokenizer(pieces, prompt_ids), output_ids) == whole


@given(text=st.text(alphabet="ab é€🎉", max_size=30))
def test_pieces_join_to_the_text_of_all_ids_when_spaces_belong_to_words(pieces: Tokenizer, text: str) -> None:
    token_ids = pieces.encode(text, add_special_tokens=False)
    assert all_text(Detokenizer(pieces), token_ids) == pieces.decode(token_ids) == text


def test_character_of_several_tokens_comes_when_it_is_complete(bytes_only: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_only)
    assert [detokenizer.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_first_word_keeps_its_space_behind_a_prompt(pieces: Tokenizer) -> None:
    word = pieces.encode("ab", add_special_tokens=False)
    assert Detokenizer(pieces, pieces.encode("a")).push(word[0]) == " ab"
    assert Detokenizer(pieces, [pieces.bos_token_id or 0]).push(word[0]) == "ab"


def test_special_tokens_next_to_each_other_are_joined_when_spaces_are_not_wanted(pieces: Tokenizer) -> None:
    end = pieces.token_id("</s>") or 0
    token_ids = [*pieces.encode("ab", add_special_tokens=False), end, end]
    joined = Detokenizer(pieces, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert all_text(joined, token_ids) == "ab</s></s>"


def test_ids_without_a_token_have_no_text(bytes_only: Tokenizer) -> None:
    assert all_text(Detokenizer(bytes_only), [*b"a", 100_000, *b"b"]) == "ab"


def run(tokenizer: Tokenizer, token_ids: Sequence[int], **params: object) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string of a sequence whose core would go on."""
    text = SequenceText(tokenizer, [], SamplingParams(**params))  # type: ignore[arg-type]
    for number, token_id in enumerate(token_ids, start=1):
        if text.push(token_id):
            return text.text, number, text.stop_string
    text.finish()
    return text.text, len(token_ids), text.stop_string


@pytest.mark.parametrize(
    ("tokens", "params", "found"),
    [
        (b"one END two", {"stop": "END"}, ("one ", 7, "END")),
        (b"one END two", {"stop": "END", "include_stop_str_in_output": True}, ("one END", 7, "END")),
        (b"abcd", {"stop": ("cd", "bcd")}, ("a", 4, "bcd")),
        (b"abcd", {"stop": ("b", "bcd")}, ("a", 2, "b")),
        (b"xx.yy.zz", {"stop": ".", "min_tokens": 4}, ("xx.yy", 6, ".")),
        (b"xx.yy.zz", {"stop": ".", "min_tokens": 3}, ("xx", 3, ".")),
        (b"ab\xe2", {"stop": "\ufffd"}, ("ab", 3, "\ufffd")),  # in what was held back
        (b"abc", {"detokenize": False}, ("", 3, None)),
    ],
)
def test_the_stop_string_that_begins_first_ends_a_text(
    bytes_only: Tokenizer, tokens: bytes, params: dict[str, Any], found: tuple[str, int, str | None]
) -> None:
    assert run(bytes_only, tokens, **params) == found


def test_token_that_ends_the_sequence_is_not_shown(bytes_only: Tokenizer) -> None:
    for include, expected in ((False, "ab"), (True, "abc")):
        text = SequenceText(bytes_only, [], SamplingParams(include_stop_str_in_output=include))
        for byte in b"ab":
            text.push(byte)
        text.push(ord("c"), is_end=True)
        assert text.text == expected


_SMALL_TEXT = st.text(alphabet="ab€", min_size=1, max_size=4)


@given(
    text=st.text(alphabet="ab€🎉", max_size=24),
    stops=st.lists(_SMALL_TEXT, min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_what_is_visible_only_grows_into_the_final_text(
    bytes_only: Tokenizer, text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99)
    token_ids = text.encode()
    sequence = SequenceText(bytes_only, [], params)
    seen = [""]
    stopped_after = None
    for number, token_id in enumerate(token_ids, start=1):
        if sequence.push(token_id):
            stopped_after = number
            break
        seen.append(sequence.text[: sequence.num_visible_chars()])
    sequence.finish()
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert sequence.text.startswith(seen[-1])
    assert (stopped_after, sequence.text) == stopped_text(token_ids, stops, include, min_tokens)


def stopped_text(token_ids: bytes, stops: Sequence[str], include: bool, min_tokens: int) -> tuple[int | None, str]:
    """The plain rule: after each token, look whether a stop string has been completed by it."""
    for number in range(max(1, min_tokens), len(token_ids) + 1):
        before = len(token_ids[: number - 1].decode(errors="ignore"))
        text = token_ids[:number].decode(errors="ignore")
        matches = [
            (start, len(stop))
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if matches:
            start, length = min(matches)
            return number, text[: start + length * include]
    return None, token_ids.decode()


@given(
    token_ids=st.lists(st.integers(0, 262), min_size=1, max_size=30),
    stops=st.lists(
        st.sampled_from(["a", "b ", "€", "\ufffd", "ab", "ba", "<", "s>", "\ufffda"]), min_size=1, unique=True
    ),
    min_tokens=st.integers(0, 6),
    skip=st.booleans(),
    is_joined=st.booleans(),
)
@example(token_ids=[0xE2, 0x82, 97], stops=["\ufffda"], min_tokens=0, skip=True, is_joined=True)
def test_a_text_says_beforehand_which_token_completes_a_stop_string(
    bytes_only: Tokenizer,
    pieces: Tokenizer,
    token_ids: list[int],
    stops: list[str],
    min_tokens: int,
    skip: bool,
    is_joined: bool,
) -> None:
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, max_tokens=40, skip_special_tokens=skip)
    text = SequenceText(bytes_only if is_joined else pieces, [1, 97], params)
    for token_id in token_ids:
        # what is asked about, and what becomes of forks, leaves a text as it is
        others = {other: text.completes_stop(other) for other in (97, 98, 0x82, token_id)}
        for other, completes in others.items():
            fork = text.fork()
            assert fork.push(other) is completes
            fork.finish()
        before = text.text
        if text.push(token_id):
            assert others[token_id]
            return
        assert not others[token_id]
        assert text.text.startswith(before)


def test_prompt_tokens_start_at_the_character_of_their_first_byte(bytes_only: Tokenizer, pieces: Tokenizer) -> None:
    def offsets(tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
        token_ids = tokenizer.encode(text)
        starts = text_offsets(tokenizer, token_ids, text)
        return [(tokenizer.token_text(each), start) for each, start in zip(token_ids, starts, strict=True)]

    half = "\ufffd"
    assert offsets(bytes_only, "a€<eos>b") == [("a", 0), (half, 1), (half, 1), (half, 1), ("<eos>", 2), ("b", 7)]
    # the BOS and the space before the first word are not in the text
    assert offsets(pieces, "ab é a") == [("<s>", 0), (" ab", 0), (" ", 2), (half, 3), (half, 3), (" a", 4)]
    assert offsets(pieces, "</s>ab") == [("<s>", 0), ("</s>", 0), (" ab", 4)]


def test_tokens_of_an_output_start_at_the_character_of_their_first_byte(bytes_only: Tokenizer) -> None:
    text = SequenceText(bytes_only, [], SamplingParams())
    starts = []
    for token_id in "a€é.".encode():
        starts.append(text.next_offset())
        text.push(token_id)
    assert starts == [0, 1, 1, 1, 2, 2, 3]
    assert text.next_offset() == len("a€é.")


def test_characters_that_are_held_back_with_half_a_one_count(tmp_path: Path) -> None:
    # a vocabulary may join a whole character and the beginning of another
    (tmp_path / "vocab.json").write_text(json.dumps({"xâ": 0, "Ĥ": 1, "¬": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.decode([0, 1, 2]) == "x€"
    assert text_offsets(tokenizer, [0, 1, 2], "x€") == [0, 1, 1]
    assert [tokenizer.token_bytes(token_id) for token_id in (0, 1, 2, 3)] == [b"x\xe2", b"\x82", b"\xac", b""]


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6), st.text("ab", max_size=8))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(stops: list[str], text: str) -> None:
    beginnings = [size for size in range(1, len(text) + 1) for stop in stops if stop[:-1].startswith(text[-size:])]
    assert StopStrings(stops).num_held_chars(text) == max(beginnings, default=0)


def test_stop_strings_are_found_as_by_looking_for_each_of_them() -> None:
    random = Random(7)
    for _ in range(2000):
        stops = ["".join(random.choices("ab ", k=random.randint(1, 4))) for _ in range(random.randint(1, 6))]
        text = "".join(random.choices("abc ", k=12))
        num_old = random.randint(0, 12)
        ends = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(max(0, num_old - len(stop) + 1), 12)
            if text.startswith(stop, start)
        ]
        expected = (min(ends)[0], min(ends)[2]) if ends else None
        assert StopStrings(stops).find(text, num_old) == expected
