"""Where arguments come from: flags or keywords, then OCTAVO_* variables, then a YAML file, then defaults.

The one place that reads the environment.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from octavo.config.args import EngineArgs
from octavo.config.device_args import RankArgs
from octavo.config.fields import Argument, accept, arguments, from_text
from octavo.config.server_args import ServerArgs
from octavo.core.absent import remark
from octavo.errors import ConfigError

Args = TypeVar("Args", EngineArgs, ServerArgs, RankArgs)

_log = logging.getLogger(__name__)

_PREFIX = "OCTAVO_"
_CONFIG_VARIABLE = "OCTAVO_CONFIG"
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE_WORDS = {"1", "ON", "YES", "TRUE"}

_QUOTED = re.compile(r"""'[^'<]{2,}'|"[^"]{2,}\"""")
_LINK_NAME = re.compile(
    r"OCTAVO_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_LINK_PORT_NAME, _LINK_PORT_VALUE = re.compile(r"OCTAVO_(\w+_)?PORT"), re.compile(r"(tcp|udp|sctp)://")


def known_arguments() -> dict[str, Argument]:
    """Return every argument of engine and server: one file or environment may serve all commands."""
    return arguments(EngineArgs) | arguments(ServerArgs) | arguments(RankArgs)


def gather(
    cls: type[Args],
    given: Mapping[str, Any],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Args:
    """Return the arguments of class `cls` from all sources; `given` are those of the caller, which win.

    Raises ConfigError for an unknown key or variable, with the nearest known name, and for a value outside its limits.
    """
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get(_CONFIG_VARIABLE)
    if cls is EngineArgs and (links := [name for name, value in environ.items() if is_service_link(name, value)]):
        # a command that takes both classes of arguments logs it once
        _log.warning(
            "ignored %s, which Kubernetes sets for a service of that name; enableServiceLinks: false in the pod's "
            "specification, or another name of the service, ends this note",
            ", ".join(sorted(links)),
        )
    merged = (read_yaml(Path(config_file)) if config_file else {}) | read_environment(environ)
    mine = arguments(cls)
    return cls(**({name: value for name, value in merged.items() if name in mine} | dict(given)))


def engine_args(keywords: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> EngineArgs:
    """Return the arguments of `LLM(...)`: its keywords, then OCTAVO_* variables, then defaults. Raises ConfigError."""
    known = arguments(EngineArgs)
    for name in keywords:
        if name not in known:
            raise ConfigError(f"{name} is not an argument of LLM{remark(name, known)}")
    return gather(EngineArgs, keywords, environ=environ)


def is_service_link(variable: str, text: str) -> bool:
    """Return whether Kubernetes sets the variable for a service whose name begins with octavo: `OCTAVO_SERVICE_HOST`,
    `OCTAVO_PORT=tcp://10.0.0.1:8000`, `OCTAVO_PORT_8000_TCP_ADDR`, …"""
    is_address = _LINK_PORT_NAME.fullmatch(variable) is not None and _LINK_PORT_VALUE.match(text) is not None
    return is_address or _LINK_NAME.fullmatch(variable) is not None


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the OCTAVO_* variables that are set, without those that Kubernetes sets for a service."""
    known = {f"{_PREFIX}{name.upper()}": argument for name, argument in known_arguments().items()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable == _CONFIG_VARIABLE or is_service_link(variable, text):
            continue
        if variable not in known:
            raise ConfigError(f"the environment sets {variable}, which octavo does not know{remark(variable, known)}")
        argument = known[variable]
        values[argument.name] = _checked(argument, from_text(argument, text, variable), variable)
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file whose keys are argument names, with underscores or hyphens."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {yaml_problem(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        what = "a list" if isinstance(content, list) else "a single value"
        raise ConfigError(f"{path} holds {what}, expected keys such as max_num_seqs: 64")
    known = known_arguments()
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: {key} is not an argument{remark(name, known)}")
        if name in values:
            raise ConfigError(f"{path}: {key} is there twice, with a hyphen and with an underscore; keep one")
        values[name] = _checked(known[name], value, str(path))
    return values


def yaml_problem(error: Exception) -> str:
    """Return what is wrong with a YAML text and where, without its words, which may be secret."""
    mark = getattr(error, "problem_mark", None)
    problem = _QUOTED.sub("…", getattr(error, "problem", None) or type(error).__name__)
    return problem if mark is None else f"{problem}, line {mark.line + 1}, column {mark.column + 1}"


def offline_variable() -> str | None:
    """Return the variable that keeps the hub's library from asking the hub, or None where none does."""
    # of the two the library takes the first that is not empty
    name = next((name for name in _OFFLINE_VARIABLES if os.environ.get(name)), None)
    return name if name is not None and os.environ[name].upper() in _TRUE_WORDS else None


_FOLDERS = {"cache": ".cache", "config": ".config", "data": ".local/share"}


def user_directory(kind: Literal["cache", "config", "data"], environ: Mapping[str, str] | None = None) -> Path | None:
    """Return octavo's part of a folder of the user: in XDG_CACHE_HOME, else in ~/.cache, and so on; None for a user
    without a home."""
    environ = os.environ if environ is None else environ
    stated = Path(environ.get(f"XDG_{kind.upper()}_HOME", ""))
    if stated.is_absolute():  # the specification has relative ones ignored
        return stated / "octavo"
    home = environ.get("HOME")
    return Path(home) / _FOLDERS[kind] / "octavo" if home else None


def _checked(argument: Argument, value: Any, where: str) -> Any:
    try:
        return accept(argument, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def file_stamp(path: Path | None) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced; None where there is none, or it cannot be read."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
