"""Files in the place of a tokenizer.json: Mistral's tekken.json, tiktoken's, and sentencepiece's tokenizer.model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from octavo.core.vocabulary.byte_level import SPECIAL
from octavo.core.vocabulary.sentence_pieces import piece_tokenizer, read_pieces
from octavo.core.vocabulary.tekken import TEKKEN_JSON, read_tekken
from octavo.core.vocabulary.tiktoken import GLM4_CLASS, QWEN_TIKTOKEN, TIKTOKEN_MODEL, read_tiktoken, with_prefix
from octavo.errors import CheckpointError

TOKENIZER_MODEL: Final = "tokenizer.model"
_OF_CHATGLM: Final = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
"""Tokens that the code of ChatGLM 3 adds behind those of its file."""


def ranked_beside(path: Path) -> Path | None:
    """Return the file of such tokens in a directory without a tokenizer.json, or the file itself; None for another
    path."""
    if path.is_dir():
        found = (path / name for name in _READERS if not (path / "tokenizer.json").is_file())
    else:
        found = (each for each in (path,) if path.name in _READERS)
    return next((file for file in found if file.is_file()), None)


def read_ranked(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what would be in the tokenizer.json, and in the tokenizer_config.json where none is beside it. Raises
    CheckpointError or UnsupportedModel."""
    return _READERS[file.name](file)


def _read_tokenizer_model(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a tokenizer.model, which is sentencepiece's, but for GLM-4. Raises CheckpointError or UnsupportedModel."""
    beside = file.parent / "tokenizer_config.json"
    try:
        config = json.loads(beside.read_bytes()) if beside.is_file() else {}
        kind = config.get("tokenizer_class")
        if kind == GLM4_CLASS:
            return read_tiktoken(file)
        contents, own = piece_tokenizer(read_pieces(file.read_bytes()), is_legacy=config.get("legacy") is not False)
        if kind != "ChatGLMTokenizer":
            return contents, {"add_bos_token": True, "add_eos_token": False, **own}
        first = len(contents["model"]["vocab"])
        added = [{**SPECIAL, "id": place, "content": content} for place, content in enumerate(_OF_CHATGLM, first)]
        return with_prefix({**contents, "added_tokens": [*contents["added_tokens"], *added]}, "[gMASK]", "sop"), own
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{file}: is not a usable tokenizer ({error!r:.200}); download it again, or put a tokenizer.json beside it"
        ) from error


_READERS: Final = {
    TEKKEN_JSON: read_tekken,
    TIKTOKEN_MODEL: read_tiktoken,
    QWEN_TIKTOKEN: read_tiktoken,
    TOKENIZER_MODEL: _read_tokenizer_model,
}
