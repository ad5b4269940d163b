"""Converts tiktoken files with tokens and ranks (Kimi, Qwen 1, GLM-4) into the layout of tokenizer.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

from octavo.core.vocabulary.byte_level import SPECIAL, byte_level_bpe
from octavo.errors import CheckpointError, UnsupportedModel

TIKTOKEN_MODEL: Final = "tiktoken.model"
QWEN_TIKTOKEN: Final = "qwen.tiktoken"
GLM4_CLASS: Final = "ChatGLM4Tokenizer"
_CLASSES: Final = {TIKTOKEN_MODEL: "TikTokenTokenizer", QWEN_TIKTOKEN: "QWenTokenizer"}
"""The tokenizer class for which each file name is read; other tokenizers have files with the name of GLM-4's, too."""
_NUM_SPECIAL: Final = 256
"""Number of special tokens after those with ranks, in Kimi's files."""
_OF_QWEN: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
"""Special tokens after those with ranks, in Qwen's file."""
_NO_HAN: Final = r"&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NO_HAN}", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NO_HAN}"
_END: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN: Final = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Matches the pieces into which Kimi's tokenizer splits a text before it merges."""
GPT4: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of pieces of GPT-4, Llama 3 and GLM-4."""
QWEN: Final = GPT4.replace("{1,3}", "")
"""The pattern of pieces of Qwen."""


def read_tiktoken(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the equivalent contents of tokenizer.json; the tokenizer_config.json beside the file is used unchanged.

    Raises CheckpointError, and UnsupportedModel for a file of another tokenizer.
    """
    beside = file.parent / "tokenizer_config.json"
    kind, stated = _read_config(beside)
    expected = _CLASSES.get(file.name, GLM4_CLASS)
    if kind != expected:
        raise UnsupportedModel(
            f"{beside}: tokenizer_class is {kind!r}, expected {expected!r}; how another one cuts texts "
            f"{file.name} does not say: put a tokenizer.json into the folder"
        )
    try:
        ranks = _read_ranks(file)
        if expected == GLM4_CLASS:
            added = [{**SPECIAL, **entry, "id": place} for place, entry in sorted(stated.items())]
            return with_prefix(byte_level_bpe(ranks, 0, GPT4, added), "[gMASK]", "<sop>"), {}
        if file.name == QWEN_TIKTOKEN:
            names = enumerate(_OF_QWEN, len(ranks))
            added = [{**SPECIAL, "id": place, "content": content} for place, content in names]
            return {**byte_level_bpe(ranks, 0, QWEN, added), "normalizer": {"type": "NFC"}}, {}
        return byte_level_bpe(ranks, 0, PATTERN, _of_kimi(beside, stated, len(ranks))), {}
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: is not a usable tokenizer ({error!r:.200}); download it again") from error


def with_prefix(contents: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the contents of a tokenizer.json that puts these added tokens before each text. Raises ValueError."""
    ids = {each["content"]: each["id"] for each in contents["added_tokens"]}
    if lacking := [name for name in names if name not in ids]:
        raise ValueError(f"its added tokens lack {lacking[0]}")
    first = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names}
    post = {"single": [*first, text], "pair": [*first, text, second], "special_tokens": tokens}
    return {**contents, "post_processor": {"type": "TemplateProcessing", **post}}


def _of_kimi(beside: Path, stated: dict[int, dict[str, Any]], num_ranks: int) -> list[dict[str, Any]]:
    """Return Kimi's added tokens. Raises CheckpointError."""
    places = range(num_ranks, num_ranks + _NUM_SPECIAL)
    if others := [place for place in stated if place not in places]:
        raise CheckpointError(
            f"{beside}: added_tokens_decoder has the id {others[0]}, expected {places[0]} to {places[-1]}, those "
            f"behind the {num_ranks:,} tokens of {TIKTOKEN_MODEL}; download both files of one model again"
        )
    return [
        {**SPECIAL, "content": f"<|reserved_token_{place}|>", **stated.get(place, {}), "id": place} for place in places
    ]


def _read_config(file: Path) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Return the class of a tokenizer, and the entries of its added tokens by id. Raises CheckpointError."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        listed = config.get("added_tokens_decoder") or {}
        return config.get("tokenizer_class"), {int(key): {**entry} for key, entry in listed.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not a tokenizer's config ({error!r:.200}); download it again") from error


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Return tokens in the order of their ranks. Raises ValueError."""
    lines = [line.split() for line in file.read_bytes().splitlines() if line.strip()]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if [*ranks.values()] != [*range(len(lines))]:
        raise ValueError("ranks do not go up from 0 by 1, or tokens are there twice")
    return ranks
