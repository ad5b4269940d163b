"""Reports a measurement: version, commit and machine, then the figures as one line of JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from os.path import expanduser
from pathlib import Path
from typing import Any

import msgspec

from octavo import __version__
from octavo.cli.terminal import say
from octavo.errors import ConfigError
from octavo.platform import Platform


def report(name: str, workload: dict[str, Any], result: dict[str, Any], text: str | None = None) -> None:
    """Write version, commit, machine and the figures as text to stderr, and all of it as one line of JSON to stdout.

    text: the figures as text for stderr; by default a line for each."""
    platform = Platform.detect()
    commit = source_commit()
    print(f"octavo {__version__}{f' at {commit}' if commit else ''}", file=sys.stderr)
    print(f"{platform.cpu_model}, {platform.cores} cores, {platform.system}", file=sys.stderr)
    if text is not None:
        say(text, sys.stderr)
    for key, value in (workload | result).items():
        if text is None and isinstance(value, float):
            print(f"  {key:22} {value:,.4g}", file=sys.stderr)
    line = {"benchmark": name, "version": __version__, "commit": commit, "cpu": platform.cpu_model}
    print(msgspec.json.encode(line | {"cores": platform.cores} | workload | rounded(result)).decode())


def check_file(name: str, path: str | None) -> None:
    """Raise ConfigError if the file that the option `name` gives cannot be written; called before the work for it."""
    if path is None:
        return
    place = Path(expanduser(path))
    is_there = place.exists()
    must_be = place if is_there else place.parent
    if must_be.is_dir() == is_there or not os.access(must_be, os.W_OK):
        raise ConfigError(
            f"{name} is {path!r}, which cannot be written; name a file in a folder of yours that is there"
        )


def write_file(name: str, path: str | None, body: bytes) -> None:
    """Write the file that the option `name` gives, if it is set. Raises ConfigError."""
    if path is None:
        return
    try:
        Path(expanduser(path)).write_bytes(body)
    except OSError as error:
        raise ConfigError(f"{name} is {path!r}, which cannot be written: {error.strerror}") from error


def rounded(value: Any) -> Any:
    """Return `value` with every number rounded to six significant digits: further digits of a clock are noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def source_commit() -> str | None:
    """Return the commit of octavo's source, with a plus when files differ from it; None for an installed package."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and git("status", "--porcelain", "--untracked-files=no") else head
