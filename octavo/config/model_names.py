"""Short names of models on a hub, such as qwen3:0.6b: the package's table, and the user's own over it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from octavo.config.sources import user_directory
from octavo.errors import CheckpointError, ConfigError, suggestion

_TABLE: Final = Path(__file__).with_name("model_names.txt")
_SHORT: Final = re.compile(r"[\w.-]+:[\w.-]+")
_MAX_BYTES: Final = 1 << 20


def short_names() -> dict[str, str]:
    """Return names on a hub by short name. Raises ConfigError for a user's table that cannot be read."""
    names = _read(_TABLE)
    folder = user_directory("config")
    own = None if folder is None else folder / "models.txt"
    return names if own is None or not own.is_file() else names | _read(own)


def is_short_name(name: str) -> bool:
    """Return whether `name` has the form of a short name: model:size."""
    return _SHORT.fullmatch(name) is not None


def full_name(name: str) -> str:
    """Return the hub's name for a short one, any other name unchanged. Raises CheckpointError for an unknown one."""
    if not is_short_name(name):
        return name
    names = short_names()
    found = names.get(name.lower())
    if found is None:
        family = [known for known in names if known.partition(":")[0] == name.lower().partition(":")[0]]
        relatives, near = (f"; there are {', '.join(family)}", "") if family else ("", suggestion(name, names))
        raise CheckpointError(
            f"{name}: no short name of a model{relatives}; give the name on the hub (owner/model), or add a line to "
            f"octavo/models.txt in your configuration folder{near}"
        )
    return found


def sizes_of(name: str) -> str:
    """Return what follows an error about a name without an owner, such as qwen3: the short names that begin with it."""
    names = [known for known in short_names() if known.startswith(name.lower())] if "/" not in name else []
    return f"; did you mean {', '.join(names)}?" if names else ""


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the table of short names {path}: {error}") from error
    names = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not is_short_name(words[0]):
            raise ConfigError(
                f"{path}, line {number}: {line!r}, expected a short name and a hub name: mine:7b owner/model"
            )
        names[words[0].lower()] = words[1]
    return names
