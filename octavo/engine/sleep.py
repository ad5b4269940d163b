"""An engine that gives its memory back for a while, and one that gets other weights, with a label."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Final

from octavo.core.messages import EngineCoreOutput
from octavo.core.outputs import FIRST_WEIGHT_VERSION
from octavo.core.request_limits import check_field
from octavo.errors import ConfigError, InvalidRequest
from octavo.executor.executor import Executor

_log = logging.getLogger(__name__)

LEVELS: Final = (0, 1, 2)
TAGS: Final = ("weights", "kv_cache", "scheduling")


class Sleep:
    """Whether the workers of a core have weights and KV caches. While they have none, requests wait.

    Every method but `check_awake` raises ConfigError where the core does not allow it. is_on: whether they have none.
    """

    def __init__(self, executor: Executor, restart: Callable[[str], None], *, is_allowed: bool) -> None:
        """restart: makes all requests wait without blocks, for a reason, and returns when no step runs."""
        self.is_on = False
        self._path: str | None = None
        """Where the weights are read from; None for the checkpoint that the engine was started with."""
        self._executor = executor
        self._restart = restart
        self._is_allowed = is_allowed

    def begin(self) -> None:
        """Give back the memory of weights and KV cache; requests keep their tokens.

        Raises ConfigError where the weights could not be loaded again, and nothing changes.
        """
        self._open(self._path)
        self._drop("the engine sleeps")
        _log.info("the engine sleeps: it has neither weights nor KV cache")

    def end(self) -> None:
        """Load the weights again. Raises ConfigError where that fails on any rank, and the sleep goes on."""
        if not self.is_on:
            return
        self._open(self._path)
        try:
            self._check(self._executor.call("load_again"))
        except ConfigError:
            self._executor.call("sleep")  # where the others have loaded them
            raise
        self._executor.call("wake_up")
        self.is_on = False
        _log.info("the engine computes with the weights %s", f"of {self._path}" if self._path else "that it began with")

    def check_weights(self, path: str | None) -> None:
        """Raise ConfigError where `update_weights` would for weights that do not fit; nothing changes."""
        self._open(path)

    def update_weights(self, path: str | None) -> None:
        """Compute with the weights of another checkpoint of the same model from now on; a sleep ends. path: None for
        those of the start.

        Requests go on from their tokens, which are computed again. Raises ConfigError where the weights do not fit, and
        nothing changes.
        """
        self._open(path)
        self._path = path
        self._drop("the weights are replaced")
        self.end()

    def check_awake(self, method: str) -> None:
        """Raise ConfigError during a sleep."""
        if self.is_on:
            raise ConfigError(f"{method} needs the weights, and the engine sleeps; wake it up first")

    def _open(self, path: str | None) -> None:
        """Have all ranks open the weights that they load next."""
        if not self._is_allowed:
            raise ConfigError("this engine keeps its weights and its memory; start it with enable_sleep_mode")
        self._check(self._executor.call("open_weights", path))

    def _check(self, errors: Iterable[str | None]) -> None:
        error = next(filter(None, errors), None)
        if error is not None:
            raise ConfigError(f"{error}; the engine sleeps until it has loaded weights" if self.is_on else error)

    def _drop(self, because: str) -> None:
        if not self.is_on:
            self.is_on = True  # no step is planned from here on
            self._restart(because)
            self._executor.call("sleep")


class WeightVersion:
    """The label that a trainer gave the weights of a core."""

    def __init__(self, finish_steps: Callable[[], None]) -> None:
        self.label: str | None = None
        self._finish_steps = finish_steps

    def get(self) -> str:
        return self.label or FIRST_WEIGHT_VERSION

    def set(self, label: str) -> None:
        """Label the tokens drawn from now on; steps in flight keep the previous label."""
        self._finish_steps()
        self.label = label

    def mark(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Return the outputs of a step with the label."""
        for each in outputs:
            each.weight_version = self.label
        return outputs


def checked_version(label: str) -> str:
    """Return a label of weights. Raises InvalidRequest."""
    if not label:
        raise InvalidRequest("new_version is empty; give a label, such as the number of a step", field="new_version")
    check_field("new_version", label)
    return label


def checkpoint_path(path: str | Path) -> str:
    """Return a path that means the same in every process and when the weights are read again. Raises InvalidRequest."""
    if not path:
        raise InvalidRequest("model_path is empty; give the directory or the file of a checkpoint", field="model_path")
    return str(Path(expanduser(path)).absolute())


def check_level(level: int) -> None:
    """Raise InvalidRequest for another level than those of vLLM."""
    if level not in LEVELS:
        what = "must be 0 (a pause), or 1 or 2, which do the same here"
        raise InvalidRequest(f"level is {level!r}, {what}", field="level")


def check_tags(tags: Sequence[str] | None) -> None:
    """Raise InvalidRequest for tags of `wake_up` that are not vLLM's."""
    for tag in tags or ():
        if tag not in TAGS:
            known = f"{', '.join(TAGS[:-1])} or {TAGS[-1]}"
            raise InvalidRequest(f"tags has {tag!r}, expected {known}, or none for all", field="tags")
