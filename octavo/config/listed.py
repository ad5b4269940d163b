"""What errors say of folders and configs of models that octavo does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.config.checkpoint import Checkpoint

_OTHER_FOLDERS: Final = {
    "adapter_config.json": "this is an adapter: serve its base model with --enable-lora and --lora-modules NAME=FOLDER",
    "model_index.json": "this is a pipeline of diffusers, and octavo makes no images",
}
"""What is said of a folder without a config, by a file in it."""


def other_folder(path: Path) -> str:
    """Return what an error about a folder without a config adds, empty for nothing."""
    return next((f"; {said}" for name, said in _OTHER_FOLDERS.items() if (path / name).is_file()), "")


@contextmanager
def naming_unlisted(checkpoint: Checkpoint) -> Iterator[None]:
    """Let a CheckpointError about a key of `config.json` say that the architecture is not one of octavo's families."""
    try:
        yield
    except CheckpointError as error:
        names = checkpoint.values.get("architectures")
        if not isinstance(names, list) or not names or not str(error).startswith(checkpoint.origin("architectures")):
            raise
        if _family(str(names[0])) in _families():
            raise
        raise type(error)(
            f"{error}; its architecture, {names[0]!s:.60}, is not among those that octavo models lists"
        ) from error


@cache
def _families() -> frozenset[str]:
    table = json.loads((files("octavo") / "models" / "families.json").read_text(encoding="utf-8"))
    return frozenset(_family(name) for row in table.values() for name in row["architectures"])


def _family(architecture: str) -> str:
    """Return what the names of a family's architectures begin with: `llama` of LlamaForSequenceClassification."""
    return re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", architecture).lower()
