"""sentencepiece's files (tokenizer.model) in the layout of tokenizer.json, and merges of pieces by their scores."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from octavo.core.vocabulary.byte_level import SPECIAL

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces."""
_SPACE: Final = "▁"
_LONGEST: Final = 512
"""Bytes of a piece, each of which is cut at all its places."""
_MOST_DEFINED: Final = 1 << 14
"""Pieces of users, more than twice those of any release: each takes time for all of them."""
_UNIGRAM, _BPE = 1, 2
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _SUFFIX, _UNK_ID, _BOS_ID, _EOS_ID = 3, 35, 24, 40, 41, 42
_CHARS_MAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPES = 2, 3, 4, 5
"""Numbers of fields in sentencepiece_model.proto."""
_DEFAULTS: Final = {_MODEL_TYPE: _UNIGRAM, _BYTE_FALLBACK: 0, _SUFFIX: 0, _UNK_ID: 0, _BOS_ID: 1, _EOS_ID: 2}


class Piece(NamedTuple):
    """A piece of text, how good it is, and its kind."""

    text: str
    score: float
    kind: int


class PieceModel(NamedTuple):
    """What a file says: pieces by id, and the fields of how it was trained and how texts are normalised."""

    pieces: Sequence[Piece]
    trainer: Mapping[int, Any]
    normalizer: Mapping[int, Any]


def read_pieces(data: bytes) -> PieceModel:
    """Return what is in a tokenizer.model. Raises ValueError for another file."""
    pieces: list[Piece] = []
    parts: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for field, value in _fields(data):
        if field == _PIECES and isinstance(value, bytes):
            found = dict(_fields(value))
            text, score = found.get(1, b""), found.get(2, bytes(4))
            if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4 or len(text) > _LONGEST:
                raise ValueError(f"piece {len(pieces)} is no text of up to {_LONGEST} bytes with a score")
            pieces.append(Piece(text.decode(), struct.unpack("<f", score)[0], int(found.get(3, NORMAL))))
        elif field in parts:
            parts[field] = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    return PieceModel(pieces, {**_DEFAULTS, **parts[_TRAINER]}, parts[_NORMALIZER])


def piece_tokenizer(model: PieceModel, *, is_legacy: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of a tokenizer.json, and what a tokenizer_config.json would say.

    is_legacy: a space is put before each part of a text between special tokens, not before the text alone. Raises
    ValueError for a kind of model that is not implemented.
    """
    pieces, trainer = model.pieces, model.trainer
    if trainer[_MODEL_TYPE] not in (_UNIGRAM, _BPE) or trainer[_SUFFIX] or not model.normalizer.get(_ESCAPES, 1):
        raise ValueError("it is made of words or characters, or has spaces behind words, which is not implemented")
    has_prefix = bool(model.normalizer.get(_DUMMY_PREFIX, 1))
    unknown = next((number for number, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    has_bytes = bool(trainer[_BYTE_FALLBACK]) or any(piece.kind == BYTE for piece in pieces)
    ids = {"bos_token": _id(trainer, _BOS_ID), "eos_token": _id(trainer, _EOS_ID)}
    config = {name: pieces[number].text for name, number in ids.items() if 0 <= number < len(pieces)}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    replaces_spaces = is_legacy or not has_prefix
    users = _users_pieces(model, replaces_spaces=replaces_spaces)
    contents = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(pieces, users),
        "normalizer": _normalizer(model, users, has_prefix=has_prefix and is_legacy, replaces_spaces=replaces_spaces),
        "pre_tokenizer": None
        if replaces_spaces
        else {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _unigram(pieces, unknown, has_bytes=has_bytes)
        if trainer[_MODEL_TYPE] == _UNIGRAM
        else _bpe(pieces, unknown, has_bytes=has_bytes),
    }
    return contents, config


def piece_merges(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs that make pieces, best first: a pair is as good as the score of the piece that it makes.

    pieces: with their ids, by which `scores` are found.
    """
    found = []
    for piece, number in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[number], number, pieces[left], pieces[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _id(trainer: Mapping[int, Any], field: int) -> int:
    """Return an id; those that are -1, for none, are stored as large numbers."""
    return int(trainer[field]) if trainer[field] < 1 << 31 else -1


def _bpe(pieces: Sequence[Piece], unknown: int | None, *, has_bytes: bool) -> dict[str, Any]:
    ids: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        ids.setdefault(piece.text, number)
    joined = {text: number for text, number in ids.items() if pieces[number].kind in (NORMAL, USER_DEFINED, UNUSED)}
    merges = piece_merges(joined, [piece.score for piece in pieces])
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else pieces[unknown].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": has_bytes,
        "ignore_merges": False,
        "vocab": ids,
        "merges": [list(pair) for pair in merges],
    }


def _unigram(pieces: Sequence[Piece], unknown: int | None, *, has_bytes: bool) -> dict[str, Any]:
    # what users define is found wherever it stands
    vocabulary = [[text, -0.1 if kind == USER_DEFINED else score] for text, score, kind in pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": has_bytes}


def _users_pieces(model: PieceModel, *, replaces_spaces: bool) -> list[str]:
    """Return the pieces that a BPE finds in the normalised text before it merges others: those of users.

    Pieces with spaces are left to merges where normalisation would change them.
    """
    if model.trainer[_MODEL_TYPE] != _BPE:
        return []
    keeps_spaces = replaces_spaces and not model.normalizer.get(_CHARS_MAP)
    defined = [each.text for each in model.pieces if each.kind == USER_DEFINED]
    if len(defined) > _MOST_DEFINED:
        raise ValueError(f"it has {len(defined):,} pieces of users, of which at most {_MOST_DEFINED:,} are read")
    return [text for text in defined if keeps_spaces or _SPACE not in text]


def _added(pieces: Sequence[Piece], users: Sequence[str]) -> list[dict[str, Any]]:
    """Return special tokens, which stand in texts as they are, and those that stand in normalised texts."""
    wanted = {*users}
    added = [(number, text, kind) for number, (text, _, kind) in enumerate(pieces)]
    return [
        {**SPECIAL, "special": text not in wanted, "normalized": text in wanted, "id": number, "content": text}
        for number, text, kind in added
        if kind in (UNKNOWN, CONTROL) or text in wanted
    ]


def _normalizer(
    model: PieceModel, users: Sequence[str], *, has_prefix: bool, replaces_spaces: bool
) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []

    def replace(pattern: str, content: str) -> None:
        steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})

    if charsmap := model.normalizer.get(_CHARS_MAP):
        _check_charsmap(charsmap)
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if model.normalizer.get(_EXTRA_SPACES, 1):
        replace(r"\A +| +\z", "")
        replace(" {2,}", " ")
    if has_prefix:
        # users' pieces are normalised like texts, and stay as they are
        exempt = "|".join(re.escape(each) for each in users)
        replace(rf"\A(?!(?:{exempt})\z)(?=[\s\S])" if users else r"\A(?=[\s\S])", _SPACE)
    if replaces_spaces:
        replace(" ", _SPACE)
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _check_charsmap(data: bytes) -> None:
    """Raise ValueError for a map of characters that leads outside of itself, for which the library panics.

    It is the size in bytes of a double-array trie, which has 256 units of 32 bits for each of its nodes, the trie, and
    texts that end with a zero byte, to which its leaves point.
    """
    size = int.from_bytes(data[:4], "little")
    units, texts = memoryview(data)[4 : 4 + size // 1024 * 1024].cast("I"), data[4 + size :]
    starts = {0, *(place + 1 for place, byte in enumerate(texts) if byte == 0)} - {len(texts)}
    if not units or len(units) * 4 != size or texts[-1:] != b"\0":
        raise ValueError("its map of characters has another size than it says")
    for place, unit in enumerate(units):
        is_leaf = unit >> 31
        offset = (unit >> 10) << ((unit & 1 << 9) >> 6)
        if (unit & (1 << 31) - 1) not in starts if is_leaf else place ^ offset >= len(units):
            raise ValueError("its map of characters leads outside of itself")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a message's fields. Raises ValueError where it is damaged."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, kind = tag >> 3, tag & 7
        value: Any
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind in (_EIGHT_BYTES, _BYTES, _FOUR_BYTES):
            length = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
            if length is None:
                length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
            if at > len(data):
                raise ValueError(f"a field has {length} bytes, more than are left")
        else:
            raise ValueError(f"a field is of kind {kind}")
        yield field, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer and where it ends. Raises ValueError."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("an integer does not end")
