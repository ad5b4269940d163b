"""vLLM's `pooler_config`: a user's settings of pooling, which replace those of the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypedDict

import msgspec

from octavo.config.pooling.pooling_config import PoolingConfig
from octavo.config.section import shown
from octavo.core.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED
from octavo.errors import ConfigError

_OF_PROMPTS: Final[Mapping[str, str]] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
_OF_TOKENS: Final = ("ALL", "STEP")
_TASK_OF_TOKENS: Final[Mapping[str, str]] = {EMBED: TOKEN_EMBED, CLASSIFY: TOKEN_CLASSIFY}
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("pooling_type", "seq_pooling_type", "tok_pooling_type", "task"), (str,)),
    "use_activation": (bool,),
    "step_tag_id": (int,),
}


class PoolerConfig(TypedDict, total=False):
    """What the argument `pooler_config` takes: a mapping, under the name that vLLM has for it."""

    task: str
    pooling_type: str
    seq_pooling_type: str
    tok_pooling_type: str
    use_activation: bool
    step_tag_id: int


def with_overrides(found: PoolingConfig, given: Mapping[str, Any]) -> PoolingConfig:
    """Return the config with what `given` says in its place. Raises ConfigError."""
    kinds = _types(given)
    for kind in kinds:
        if kind in _OF_PROMPTS:
            found = msgspec.structs.replace(found, modes=(_OF_PROMPTS[kind],), size=_size(found))
    task = given.get("task")
    if task is None and any(kind in _OF_TOKENS for kind in kinds):
        task = _TASK_OF_TOKENS.get(found.task)
    if task is not None and task != found.task:
        found = _for_task(found, task)
    if (step := given.get("step_tag_id")) is not None:
        found = msgspec.structs.replace(found, step_token_id=step)
    applies = given.get("use_activation")
    if applies is not None and found.task in (EMBED, TOKEN_EMBED):
        return msgspec.structs.replace(found, normalize=applies)
    return msgspec.structs.replace(found, activation="identity") if applies is False else found


def _types(given: Mapping[str, Any]) -> list[str]:
    """Return the types of pooling among the values. Raises ConfigError for names and values that there are not."""
    for name, value in given.items():
        if name not in _KINDS:
            raise ConfigError(f"pooler_config has {name}, expected one of {', '.join(_KINDS)}")
        if value is not None and type(value) not in _KINDS[name]:
            raise ConfigError(f"pooler_config: {name} is {shown(value)}, expected {_KINDS[name][0].__name__}")
    types = [given[name] for name in ("pooling_type", "seq_pooling_type", "tok_pooling_type") if given.get(name)]
    for each in types:
        if each not in _OF_PROMPTS and each not in _OF_TOKENS:
            raise ConfigError(f"pooler_config: {shown(each)} is no type, expected CLS, LAST, MEAN, ALL or STEP")
    return types


def _for_task(found: PoolingConfig, task: str) -> PoolingConfig:
    """Return the config of a model that makes something else of a prompt. Raises ConfigError."""
    possible = {*found.tasks, _TASK_OF_TOKENS.get(found.task)} - {None}
    if task not in possible or found.token_ids:
        names = ", ".join(sorted(filter(None, possible)))
        raise ConfigError(f"pooler_config: task is {shown(task)}, but this model makes {names}")
    return msgspec.structs.replace(found, task=task)


def _size(found: PoolingConfig) -> int:
    """Return the size of vectors of one mode: a file may put several side by side."""
    return found.size if found.dense else found.size // len(found.modes)
