"""Options whose value is JSON, with fields of vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import TypeVar

import msgspec

from octavo.core.profiler_config import ProfilerConfig
from octavo.errors import ConfigError, suggestion

T = TypeVar("T", bound=msgspec.Struct)


def read_option(option: str, given: Mapping[str, object], kind: type[T]) -> T:
    """Return the fields of an option with their types. Raises ConfigError with the field, its value and what it may
    be."""
    known = kind.__struct_fields__
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{option} has the unknown field {name!r}, expected some of {', '.join(known)}"
                f"{suggestion(str(name), known)}"
            )
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(
            f"{option}: {name} is {given.get(name)!r:.60}, {expected[:1].lower()}{expected[1:]}"
        ) from error


def profiler_config(given: Mapping[str, object]) -> ProfilerConfig | None:
    """Return how profiles are made; None for none. Raises ConfigError."""
    config = read_option("profiler_config", given, ProfilerConfig)
    if config.profiler is None:
        return None
    if not config.torch_profiler_dir:
        raise ConfigError("profiler_config: torch_profiler_dir is not set; give the directory that gets the traces")
    return msgspec.structs.replace(
        config, torch_profiler_dir=str(Path(expanduser(config.torch_profiler_dir)).absolute())
    )
