"""Tokenizer: one BOS, honest ids, and clear words about a directory without one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from octavo.engine.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from octavo.errors import CheckpointError, InvalidRequest
from tests.fakes.byte_tokenizer import BOS, EOS, USER, byte_tokenizer, piece_tokenizer, write_byte_tokenizer
from tests.fakes.vector_models import write_tokenizer


def test_ids_of_a_text_decode_to_the_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    text = "Héllo, wörld 🎉\n\t日本語"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_has_the_ids_of_its_bytes(tmp_path: Path) -> None:
    text = "abc " * LONG_TEXT_CHARS
    assert byte_tokenizer(tmp_path).encode(text) == list(text.encode())


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_long_pair_is_cut_in_little_time(tmp_path: Path, side: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    first, second = [*range(4, 100)] * 5, [*range(99, 3, -1)] * 5
    texts = [" ".join(f"w{token - 4}" for token in ids) for ids in (first, second)]
    begin = time.process_time()
    ids, second_start = tokenizer.encode_whole(texts, 5, side=side)
    assert time.process_time() - begin < 1
    place = 0 if side == "right" else -1
    assert (ids, second_start) == ([1, first[place], 2, second[place], 2], 3)


def test_bos_is_added_once_where_the_config_asks_for_it(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, add_bos_token=True)
    assert tokenizer.encode("hi") == [BOS, *b"hi"]
    assert tokenizer.encode("<bos>hi") == [BOS, *b"hi"]
    assert tokenizer.encode("<bos><bos>hi") == [BOS, BOS, *b"hi"]
    assert tokenizer.encode("hi", add_special_tokens=False) == [*b"hi"]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}])
def test_every_bos_of_a_text_stays_where_none_is_added(config: dict[str, bool], tmp_path: Path) -> None:
    assert byte_tokenizer(tmp_path, **config).encode("<bos><bos>hi") == [BOS, BOS, *b"hi"]


def test_text_with_a_lone_surrogate_is_refused_with_its_place(tmp_path: Path) -> None:
    for text in ("ab\udcff", "\ud83d" * LONG_TEXT_CHARS):
        with pytest.raises(InvalidRequest, match=r"prompt is no valid Unicode text: .* lone surrogate \(U\+D"):
            byte_tokenizer(tmp_path).encode(text)


def test_eos_is_added_where_the_config_asks_for_it(tmp_path: Path) -> None:
    assert byte_tokenizer(tmp_path, add_bos_token=False, add_eos_token=True).encode("hi") == [*b"hi", EOS]


def test_post_processor_of_the_tokenizer_adds_bos_once_when_the_config_says_nothing(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
    }
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("hi") == [BOS, *b"hi"]
    assert tokenizer.encode("<bos>hi") == [BOS, *b"hi"]
    assert tokenizer.encode("<bos><bos>hi") == [BOS, BOS, *b"hi"]


def test_special_tokens_are_left_out_of_text_unless_wanted(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.decode([BOS, *b"hi", EOS]) == "hi"
    assert tokenizer.decode([BOS, *b"hi", EOS], skip_special_tokens=False) == "<bos>hi<eos>"
    assert tokenizer.special_ids == {BOS, EOS, USER}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (BOS, EOS, 259)


def test_special_tokens_may_be_objects_in_a_map_of_their_own(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<bos>"}, "eos_token": "<eos>"})
    )
    tokenizer = Tokenizer.open(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<bos>", EOS)


def test_added_tokens_of_the_config_get_the_ids_it_gives(tmp_path: Path) -> None:
    added = {"259": {"content": "<tool>", "special": True}, "257": {"content": "<eos>", "special": True}}
    tokenizer = byte_tokenizer(tmp_path, added_tokens_decoder=added)
    assert tokenizer.encode("a<tool>") == [ord("a"), 259]
    with pytest.raises(CheckpointError, match=r"'<tool>' the id 400, but in tokenizer.json it gets 259"):
        byte_tokenizer(tmp_path, added_tokens_decoder={"400": added["259"]})


@pytest.mark.parametrize("added", [["<tool>"], {"first": {"content": "<tool>"}}, {"259": {}}, {"259": "<tool>"}])
def test_added_tokens_that_are_not_understood_are_named(added: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: added_tokens_decoder is not"):
        byte_tokenizer(tmp_path, added_tokens_decoder=added)


def test_text_of_a_token_keeps_the_space_before_its_word(tmp_path: Path) -> None:
    tokenizer = piece_tokenizer(tmp_path)
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("ab a", add_special_tokens=False)] == [
        " ab",
        " a",
    ]
    assert tokenizer.token_text(tokenizer.token_id("</s>") or 0) == "</s>"
    assert tokenizer.token_text(100_000) == ""


def test_word_stands_for_its_tokens_inside_a_text_and_behind_a_space(tmp_path: Path) -> None:
    assert byte_tokenizer(tmp_path).encode_word("no") == [(*b"no",), (*b" no",)]
    assert byte_tokenizer(tmp_path).encode_word(" no") == [(*b" no",)]


def test_word_has_no_second_space_where_a_text_starts_with_one_of_its_own(tmp_path: Path) -> None:
    tokenizer = piece_tokenizer(tmp_path)
    inside, after_a_space = (tokenizer.token_id(piece) for piece in ("ab", "▁ab"))
    assert tokenizer.encode("ab", add_special_tokens=False) == [after_a_space]
    assert tokenizer.encode_word(" ab") == [(after_a_space,)]
    assert tokenizer.encode_word("ab") == [(inside,), (after_a_space,)]
    # what a model writes for the word in the middle of a text
    for word in ("ab", " ab"):
        assert tuple(tokenizer.encode("z ab", add_special_tokens=False)[-1:]) in tokenizer.encode_word(word)


def test_word_that_joins_the_text_before_it_is_encoded_by_itself(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"Ċ": 0, "ĊĊ": 1, "ĊĊĊ": 2, "Ġ": 3, ".": 4}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĊ Ċ\nĊĊ Ċ\n", encoding="utf-8")
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("\n\n\n") == [2]
    assert tokenizer.encode_word("\n\n") == [(1,), (3, 1)]


def test_vocabulary_of_the_older_kind_is_read_from_its_two_files(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"<s>": 0, "h": 1, "i": 2, "Ġ": 3, "hi": 4, "Ġhi": 5}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\nĠ hi\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": True, "bos_token": {"content": "<s>"}, "eos_token": "<s>"})
    )
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("hi hi") == [0, 4, 5]
    assert tokenizer.decode([0, 4, 5]) == "hi hi"


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, .* \(tekken\.json, .* copy one there"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", b"\x0a\x7f\x01", b"\xff" * 40, b"<!DOCTYPE html>", b"aGk= 0\naGs= 1\n"])
def test_a_damaged_sentencepiece_file_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is not a usable tokenizer .* put a tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a usable tokenizer"):
        Tokenizer.open(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: holds \[\], expected a JSON object"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 50_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("make", [byte_tokenizer, piece_tokenizer])
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(make: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    text = "ab é日本🎉 a\ufffd"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(each) or b"?" for each in token_ids).decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.eos_token_id or 0) == (tokenizer.eos_token or "").encode()
    assert tokenizer.token_bytes(100_000) == b""


def test_a_text_that_the_library_cannot_encode_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w": 0}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match=r"no tokens for this text \(.*UNK.*\); send another") as refused:
        Tokenizer.open(tmp_path).encode("x")
    assert refused.value.field == "prompt"
