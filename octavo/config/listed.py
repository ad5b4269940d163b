"""Errors about folders and configs of models that octavo does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.config.media.media_families import FAMILIES
from octavo.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    from octavo.config.checkpoint import Checkpoint

_OTHER_FOLDERS: Final = {
    "adapter_config.json": "this is an adapter: serve its base model with --enable-lora and --lora-modules NAME=FOLDER",
    "model_index.json": "this is a pipeline of diffusers, and octavo makes no images",
}
"""Explanations of folders without a config, by a file in them."""

_OTHER_NAMES: Final = ("camembert", "eurobert", "llamabidirec", "minimaxm3", "new")
"""Values of `model_type` of texts that are read, and are not in the table of families."""


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


def refuse_unlisted(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel for a config that neither octavo nor a class of transformers reads, as far as names tell
    without torch: it may let one through that is refused later."""
    architecture = checkpoint.architecture
    types = [str(checkpoint.values.get("model_type")), checkpoint.text_model_type or ""]
    known = {_plain(each) for each in (*_families(), *_OTHER_NAMES, *_names_of_media())}
    is_known = any(_plain(each) in known for each in (_family(architecture), *types))
    if is_known or checkpoint.section("speculators_config") is not None or _is_in_transformers(architecture):
        return
    raise UnsupportedModel(
        f"{checkpoint.origin('architectures', 'model_type')}: architecture is {architecture!s:.60}, which is not among "
        "those that octavo models lists, nor a text model of an installed transformers; its weights are not "
        "downloaded: take another model"
    )


def _is_in_transformers(architecture: str) -> bool:
    """Return whether transformers names this class among its models of text, without importing it."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return False
    table = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    return f'"{architecture}"' in table.read_text(encoding="utf-8")


@cache
def _families() -> frozenset[str]:
    """Return the names of families: those of their architectures, and those in the table."""
    table = json.loads((files("octavo") / "models" / "families.json").read_text(encoding="utf-8"))
    return frozenset(table) | {_family(name) for row in table.values() for name in row["architectures"]}


def _names_of_media() -> Iterator[str]:
    """Yield the families of architectures with images or sounds, and the types of their text models."""
    for row in FAMILIES:
        yield from map(_family, row.architectures)
        yield from row.text


def _family(architecture: str) -> str:
    """Return what the names of a family's architectures begin with: `llama` of LlamaForSequenceClassification."""
    return re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", architecture).lower()


def _plain(name: str) -> str:
    """Return a family or a `model_type` as they are compared: `qwen3vl` of `qwen3_vl_text`."""
    return re.sub(r"[_-]", "", name.lower().removesuffix("_text"))
