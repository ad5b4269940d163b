"""sentencepiece's files cut texts as its library does, and tokens that a model's code adds stand where it has them."""

from __future__ import annotations

import json
import struct
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.core.vocabulary.sentence_pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    piece_tokenizer,
    read_pieces,
)
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError
from octavo.structured_output.matchers import Matchers
from tests.fakes.pair_merges import merged_pairs

TEXT = """the cat's hats aren't here, they're there; the theory of theatres: if (a  ==  b) {\n\treturn  "c";\n}
12345 678 9 月の光は東京の空に。中文字符和English混合 한국어 텍스트 the end of the hats"""
TEXTS = ["the hats", " the  end ", "a", "", "x", "there the\nend", "月の光 hats <a> the<a>the <a><a>", "😀 é the", TEXT]
BPE, UNIGRAM = 2, 1


@cache
def pieces() -> tuple[Piece, ...]:
    """Special tokens, bytes, characters, and the pairs that are most frequent in the text, one after the other."""
    words = [["▁", *word] for word in TEXT.split()]
    made = dict.fromkeys(char for word in words for char in word)
    made |= dict.fromkeys(merged_pairs(words, 60))
    special = [Piece("<unk>", 0, UNKNOWN), Piece("<s>", 0, CONTROL), Piece("</s>", 0, CONTROL)]
    own = [Piece("<a>", 0, USER_DEFINED), *(Piece(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256))]
    learned = [Piece(text, -1.0 - place / 7, NORMAL) for place, text in enumerate([*made][::-1])]
    return (*special, *own, *learned)


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, value: int | bytes | float) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def write(path: Path, model: int, *, prefix: bool = True, squeezes: bool = False, **config: object) -> Path:
    """Write a tokenizer.model of this kind, and a tokenizer_config.json where `config` has something."""
    own = b"".join(
        field(1, field(1, text.encode()) + field(2, float(score)) + field(3, number))
        for text, score, number in pieces()
    )
    trainer = field(3, model) + field(35, 1) + field(43, (1 << 64) - 1)
    normalizer = field(1, b"identity") + field(3, int(prefix)) + field(4, int(squeezes))
    (path / "tokenizer.model").write_bytes(own + field(2, trainer) + field(3, normalizer))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def normalised(text: str, *, prefix: bool, squeezes: bool) -> str:
    if squeezes:
        text = text.strip(" ")
        while "  " in text:
            text = text.replace("  ", " ")
    return ("▁" + text if prefix and text else text).replace(" ", "▁")


def as_bytes(symbols: list[str]) -> list[int]:
    ids = {piece.text: number for number, piece in enumerate(pieces())}
    found = []
    for each in symbols:
        found += [ids[each]] if each in ids else [ids[f"<0x{byte:02X}>"] for byte in each.encode()]
    return found


def merged(text: str) -> list[int]:
    """What sentencepiece computes: of all pairs the one whose piece has the best score is joined first."""
    scores = {piece.text: piece.score for piece in pieces() if piece.kind == NORMAL}
    made = []
    for number, part in enumerate(text.split("<a>")):
        made += [3] if number else []
        symbols = [*part]
        while True:
            joined = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
            if not joined:
                break
            at = min(joined)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        made += as_bytes(symbols)
    return made


def likeliest(text: str) -> list[int]:
    """What sentencepiece computes: the pieces with the best sum of scores; an unknown character is worse than all."""
    scores = {piece.text: piece.score for piece in pieces() if piece.kind == NORMAL} | {"<a>": -0.1}
    worst = min(scores.values()) - 10
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = []
        for start in range(end):
            piece = text[start:end]
            if piece in scores or end - start == 1:
                ways.append((best[start][0] + scores.get(piece, worst), [*best[start][1], piece]))
        best.append(max(ways))
    return as_bytes(best[-1][1])


@pytest.mark.parametrize("squeezes", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", [BPE, UNIGRAM])
def test_texts_are_cut_as_by_sentencepiece(kind: int, prefix: bool, squeezes: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, kind, prefix=prefix, squeezes=squeezes))
    for text in TEXTS:
        known = normalised(text, prefix=prefix, squeezes=squeezes)
        assert tokenizer.encode(text, add_special_tokens=False) == (merged if kind == BPE else likeliest)(known), text
        if not squeezes:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_begins_with_bos_unless_the_config_has_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, BPE))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("</s>the", add_special_tokens=False) == [2, *merged("▁the")]
    without = Tokenizer.open(write(tmp_path, BPE, add_bos_token=False, add_eos_token=False, eos_token="<a>"))
    assert without.encode("the") == merged("▁the")
    assert without.eos_token == "<a>"


def test_later_code_of_llama_puts_a_space_before_the_text_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, BPE, legacy=False))
    assert tokenizer.encode("the</s>the hats", add_special_tokens=False) == [*merged("▁the"), 2, *merged("the▁hats")]


def test_chatglm_3_adds_tokens_behind_those_of_its_file(tmp_path: Path) -> None:
    tokenizer, first = Tokenizer.open(write(tmp_path, BPE, tokenizer_class="ChatGLMTokenizer")), len(pieces())
    assert tokenizer.encode("the hats") == [first + 1, first + 3, *merged("▁the▁hats")]
    assert tokenizer.encode("<|user|>the", add_special_tokens=False) == [first + 6, *merged("▁the")]
    assert tokenizer.decode(tokenizer.encode("the hats")) == "the hats"


MANY = b"".join(field(1, field(1, b"u%d" % number) + field(3, USER_DEFINED)) for number in range(1 << 14))


@pytest.mark.parametrize(
    "part", [field(1, field(1, b"a" * 513)), field(1, field(1, 5)), field(2, field(3, 4)), field(2, field(24, 1)), MANY]
)
def test_files_that_cannot_be_read_are_refused(part: bytes, tmp_path: Path) -> None:
    file = write(tmp_path, BPE) / "tokenizer.model"
    file.write_bytes(file.read_bytes() + part)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is not a usable tokenizer"):
        Tokenizer.open(tmp_path)


def charsmap(units: dict[int, int], texts: bytes) -> bytes:
    """A map of characters with a node of 256 units."""
    return struct.pack("<I256I", 1024, *(units.get(place, 0) for place in range(256))) + texts


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"junk!", charsmap({}, b""), charsmap({}, b"A")),
        *(charsmap({0: 256 << 10}, b"A\0"), charsmap({0: 1 << 31 | 2}, b"A\0"), charsmap({}, b"A\0")[:1000]),
    ],
)
def test_maps_of_characters_that_lead_outside_of_themselves_are_refused(damaged: bytes, tmp_path: Path) -> None:
    file = write(tmp_path, BPE) / "tokenizer.model"
    # "x" becomes "the": its unit has the label and a leaf, whose value is where the text begins
    for data in (charsmap({ord("x"): 1 << 10 | 1 << 8 | ord("x"), ord("x") ^ 1: 1 << 31}, b"the\0"), damaged):
        write(tmp_path, BPE)
        file.write_bytes(file.read_bytes() + field(3, field(2, data) + field(3, 1) + field(4, 0)))
        if data is not damaged:
            assert Tokenizer.open(tmp_path).encode("x", add_special_tokens=False) == merged("▁the")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is not a usable tokenizer"):
        Tokenizer.open(tmp_path)


def test_a_panic_of_the_library_is_damage_of_the_file(tmp_path: Path) -> None:
    contents, _ = piece_tokenizer(read_pieces((write(tmp_path, BPE) / "tokenizer.model").read_bytes()))
    contents["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "anVuayE="}
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a usable tokenizer"):
        Tokenizer.open(tmp_path)


def test_grammars_know_the_tokens(tmp_path: Path) -> None:
    matchers = Matchers(write(tmp_path, BPE), len(pieces()), [2])
    try:
        assert matchers.compile(StructuredOutputsParams(choice=("the hats", "月"))).result()
    finally:
        matchers.close()
