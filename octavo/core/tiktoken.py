"""Kimi's tokenizer files (tiktoken.model) in the layout of tokenizer.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

from octavo.core.byte_level import SPECIAL, byte_level_bpe
from octavo.errors import CheckpointError, UnsupportedModel

TIKTOKEN_MODEL: Final = "tiktoken.model"
_CLASS: Final = "TikTokenTokenizer"
_NUM_SPECIAL: Final = 256
"""Tokens behind those with ranks."""
_NO_HAN: Final = r"&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NO_HAN}", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{_NO_HAN}"
_END: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN: Final = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Matches the pieces of a text that tokens do not go beyond."""


def read_tiktoken(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what would be in the tokenizer.json; nothing is added to the tokenizer_config.json beside the file.

    Raises CheckpointError, and UnsupportedModel for a file of another tokenizer.
    """
    beside = file.parent / "tokenizer_config.json"
    kind, stated = _read_config(beside)
    if kind != _CLASS:
        raise UnsupportedModel(
            f"{beside}: tokenizer_class is {kind!r}, expected {_CLASS!r}, Kimi's; how another one cuts texts "
            f"{TIKTOKEN_MODEL} does not say: put a tokenizer.json into the folder"
        )
    try:
        ranks = _read_ranks(file)
        places = range(len(ranks), len(ranks) + _NUM_SPECIAL)
        if others := [place for place in stated if place not in places]:
            raise CheckpointError(
                f"{beside}: added_tokens_decoder has the id {others[0]}, expected {places[0]} to {places[-1]}, those "
                f"behind the {len(ranks):,} tokens of {TIKTOKEN_MODEL}; download both files of one model again"
            )
        added = [
            {**SPECIAL, "content": f"<|reserved_token_{place}|>", **stated.get(place, {}), "id": place}
            for place in places
        ]
        return byte_level_bpe(ranks, 0, PATTERN, added), {}
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: is not a usable tokenizer ({error!r:.200}); download it again") from error


def _read_config(file: Path) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Return the class of a tokenizer, and what is stated of its added tokens by their ids. Raises CheckpointError."""
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
