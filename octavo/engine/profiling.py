"""Profiles of the ranks of a core."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.executor.executor import Executor


def switch_profile(executor: Executor, name: str | None) -> None:
    """Let all ranks begin a profile with this name, or with None end it and write it.

    Raises ConfigError where that fails on any rank, which ends it on all.
    """
    error = next(filter(None, executor.call("profile", name)), None)
    if error is not None:
        if name is not None and "runs already" not in error:
            executor.call("profile", None)
        raise ConfigError(error)
