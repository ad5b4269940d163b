"""Every error that octavo raises on purpose.

    OctavoError
    ├── ConfigError              an engine argument is wrong (name, value, limit, remedy)
    ├── CheckpointError          a model directory cannot be used as it is
    │   └── UnsupportedModel     its architecture, or an option of it, is not implemented
    ├── InvalidRequest           a request is refused before it is accepted; HTTP status 400
    │   ├── ContextTooLong       the prompt does not fit the model's context
    │   ├── RequestTooLarge      the request can never fit the KV cache, even alone
    │   └── MissingLibrary       its content needs a library that is not installed
    ├── RequestFailed            an accepted request ended with an error of its own
    ├── EngineUnresponsiveError  the engine core is stopped or hangs; it may go on, or is started again
    ├── EngineRestartingError    the engine core has gone and is being started again
    ├── EngineDeadError          the engine core has gone; nothing can be served any more
    ├── ServerUnreachable        another server cannot be reached, or its connection has dropped
    └── PipeError                a pipe between processes has failed: cut, late, or no message of a pipe
        └── PipeClosed           the other end, or this one, has closed it between two messages

The message is one line for a person: what, where, and what to do. Nothing else is raised on purpose, so any other
exception that surfaces is a bug of ours.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final


class OctavoError(Exception):
    """Base of the errors above."""


class ConfigError(OctavoError, ValueError):
    """An engine argument is wrong."""


class CheckpointError(OctavoError, ValueError):
    """A model directory is missing something, has too much, or is damaged."""

    def __init__(self, message: str) -> None:
        # names in JSON may hold half of a surrogate pair, which no process could send or print
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


class UnsupportedModel(CheckpointError):
    """The checkpoint is sound but asks for something that is not implemented."""


class InvalidRequest(OctavoError, ValueError):
    """A request is refused before it is accepted.

    `field` names the offending field in the caller's words (`max_tokens`, `messages[1].role`) or is None.
    `code` is a short machine-readable word, as in the OpenAI API.
    """

    code = "invalid_value"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.prompt_index: int | None = None
        """The index of the prompt that the error is about, where there are several (`of_prompt`)."""
        if code is not None:
            self.code = code


@contextmanager
def of_prompt(index: int) -> Iterator[None]:
    """Add the index of the prompt to an InvalidRequest that the block raises, where it is about one prompt of
    several.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.field in _OF_PROMPTS:
            error.prompt_index = index
        raise


_OF_PROMPTS: Final = ("prompt", "prompt_token_ids", "max_tokens", "min_tokens")
"""Fields whose errors depend on the length or the tokens of a prompt."""


@contextmanager
def named_by_the_caller(field_names: Mapping[str, str], *, lists_prompts: bool = True) -> Iterator[None]:
    """Rename the field of an InvalidRequest that the block raises, in its message too, to the caller's name for it,
    with the index of the prompt. lists_prompts: several prompts are the entries of one field.
    """
    try:
        yield
    except InvalidRequest as error:
        message, name = str(error), error.field or ""
        if name in field_names and not _NAME.fullmatch(name):  # n, say, is a name only where a message begins with it
            message = re.sub(f"^{re.escape(name)}(?= )", field_names[name], message)
        message = renamed(message, field_names)
        if lists_prompts and error.prompt_index is not None:
            entry = f"{field_names.get('prompt', 'prompt')}[{error.prompt_index}]"
            message = f"{entry}: {message}"
            if error.field in ("prompt", "prompt_token_ids"):
                error.field = entry
        error.field = field_names.get(error.field or "", error.field)
        error.args = (message,)
        raise


def renamed(message: str, field_names: Mapping[str, str]) -> str:
    """Return a message with the caller's names for the fields that it names, but for names without an underscore."""
    return _NAME.sub(lambda found: field_names.get(found[0], found[0]), message)


_NAME = re.compile("[a-z]+(?:_[a-z]+)+")
"""A field's name with an underscore, which no ordinary word has."""


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and max_tokens together, exceed the model's context."""

    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The request needs more KV blocks or sequences than the engine has, even when it runs alone."""

    code = "request_too_large"


class MissingLibrary(InvalidRequest):
    """A request has content that only a library which is not installed can read."""

    code = "missing_library"


class RequestFailed(OctavoError, RuntimeError):
    """An accepted request ended with an error; the others go on."""


class EngineDeadError(OctavoError, RuntimeError):
    """The engine core has stopped; the message has its failure."""


class EngineUnresponsiveError(OctavoError, RuntimeError):
    """The engine core is stopped by a signal, or hangs; it may go on."""


class EngineRestartingError(OctavoError, RuntimeError):
    """No engine core is ready; one is being started again. The request can be sent again after `retry_after_s`."""

    retry_after_s = 5


class ServerUnreachable(OctavoError, RuntimeError):
    """A command cannot reach its server, or the connection to it has dropped."""


class PipeError(OctavoError, RuntimeError):
    """A pipe between processes has failed; it can only be closed."""


class PipeClosed(PipeError):
    """The other end of a pipe, or this one, has closed it between two messages."""


def is_disk_full(error: BaseException) -> bool:
    """Return whether `error`, or one that it was raised from, means that a disk or a quota is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(seen):  # from libraries that wrap it
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest known name, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def one_line(error: Exception) -> str:
    """Return the type of an error and the beginning of its text in one line, for a message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
