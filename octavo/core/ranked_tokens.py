"""Files of tokens with ranks in the place of a tokenizer.json: Mistral's tekken.json and Kimi's tiktoken.model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from octavo.core.tekken import TEKKEN_JSON, read_tekken
from octavo.core.tiktoken import TIKTOKEN_MODEL, read_tiktoken

_READERS: Final = {TEKKEN_JSON: read_tekken, TIKTOKEN_MODEL: read_tiktoken}


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
