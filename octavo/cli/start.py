"""Messages and settings of the commands that load a model."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.cli.terminal import say
from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.logging import set_up

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine


def mention_demonstration_model(args: EngineArgs) -> None:
    """Write a line to stderr when the demonstration model is used."""
    if args.model == BUILTIN_MODEL:
        say(
            f"{BUILTIN_MODEL} is a demonstration model of a few million parameters; name a model for a real one.",
            sys.stderr,
        )


def log_quietly(args: EngineArgs) -> None:
    """Log warnings and errors only, unless another level is given: the terminal shows generated text."""
    set_up("warning" if args.log_level == EngineArgs.log_level else args.log_level)


def load(args: EngineArgs) -> LLMEngine:
    """Return an engine, and write a line about its memory to stderr; `octavo explain` shows the whole plan."""
    with ends_at_interrupt():
        from octavo.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_args(args)
    say(f"memory: {engine.ready.plan_summary}", sys.stderr)
    return engine


@contextmanager
def ends_at_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once: some of the libraries that load a model lose exceptions.

    Signals stay as they are outside of the main thread, and where the program has a handler of its own.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
