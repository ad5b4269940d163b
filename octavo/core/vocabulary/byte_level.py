"""Vocabularies of bytes with ranks, in the layout of tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

SPECIAL: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""What a tokenizer.json says of a special token."""
_LONGEST: Final = 512
"""Bytes of a token, of which released vocabularies have a quarter at most: each is cut at all its places."""


def byte_of_char() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: printable ones, as GPT-2 defines them,
    stand for themselves, the others have characters from 256 on in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def byte_level_bpe(
    ranks: Mapping[bytes, int], first_id: int, pattern: str, added: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the contents of a tokenizer.json.

    ranks: of tokens in ascending order; their ids are these from first_id on. pattern: of the pieces of a text. added:
    tokens that stand in texts as they are, as a tokenizer.json has them. Raises ValueError where a byte has no token,
    where a token is too long, and where an added one is none or is there twice.
    """
    _check(ranks)
    char_of_byte = {byte: char for char, byte in byte_of_char().items()}
    texts = {token: "".join(map(char_of_byte.__getitem__, token)) for token in ranks}
    known = {*texts.values(), ""}
    for each in added:
        if not isinstance(content := each.get("content"), str) or content in known:
            raise ValueError(f"token {each['id']} is {content!r:.100}, which is no text, or another token's")
        known.add(content)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [dict(each) for each in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {str(each["content"]): int(each["id"]) for each in added}
            | {texts[token]: first_id + rank for token, rank in ranks.items()},
            "merges": [[texts[left], texts[right]] for left, right in _merges(ranks)],
        },
    }


def _check(ranks: Mapping[bytes, int]) -> None:
    """Raise ValueError for tokens that cannot stand for every text, or that take too long to cut."""
    if lacking := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise ValueError(f"{len(lacking)} of 256 bytes have no token, the first is {lacking[0]:#04x}")
    if not 0 < min(map(len, ranks)) <= (longest := max(map(len, ranks))) <= _LONGEST:
        raise ValueError(f"tokens have 1 to {_LONGEST} bytes, but one has {longest if longest > _LONGEST else 0:,}")


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of tokens that are one token together, in the order of the latter."""
    for token in ranks:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
