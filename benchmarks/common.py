"""What every benchmark prints: machine, commit, arguments, and its figures as one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.platform import Platform


def commit() -> str | None:
    """The commit of this checkout, with a plus when tracked files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    return (f"{head}+" if git("status", "--porcelain", "--untracked-files=no") else head) or None


def report(name: str, arguments: dict[str, Any], figures: dict[str, Any]) -> None:
    """Machine and commit to stderr, one line of JSON to stdout."""
    platform = Platform.detect()
    head = commit()
    print(f"octavo {__version__} at {head}; {platform.cpu_model}, {platform.cores} cores", file=sys.stderr)
    line = {"benchmark": name, "version": __version__, "commit": head, "cpu": platform.cpu_model}
    print(json.dumps(line | {"cores": platform.cores, "arguments": arguments, **figures}))
