"""`octavo chat`: a conversation on the terminal."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from octavo.cli.options import Given, heading, with_options
from octavo.cli.start import load, log_quietly, mention_demonstration_model
from octavo.cli.terminal import WordWrap, say
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.interrupt import Interrupt
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

_HELP = "/exit or Ctrl-C twice ends, /clear starts a new conversation, Ctrl-C stops an answer."


@with_options(SamplingParams, EngineArgs, model="positional", without=("n", "served_model_name", "disable_log_stats"))
def chat(
    *,
    system: Annotated[
        str | None, Parameter(help="Message that tells the model who it is.", group=heading("Prompt"))
    ] = None,
    given: Given,
) -> int:
    """Talk to a model; each answer is written as it is generated."""
    args = given.arguments(EngineArgs)
    given.sampling({"max_tokens": None})  # what is wrong with the flags is said before a model is loaded
    log_quietly(args)
    mention_demonstration_model(args)
    engine = load(args)
    params = given.sampling({"max_tokens": None} | engine.generation_defaults)
    converse(engine, params, system)
    return 0


class _CtrlC(Interrupt):
    """What Ctrl-C does during a conversation: at the prompt it raises KeyboardInterrupt, while an answer is written it
    asks for its end, and in between it does nothing. Three during one answer raise KeyboardInterrupt, too."""

    def __init__(self) -> None:
        super().__init__()
        self._is_at_prompt = False
        self._num_presses = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT inside; not outside of the main thread, nor where the program has a handler of its own."""
        is_ours = threading.current_thread() is threading.main_thread()
        if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def read_line(self, prompt: str) -> str | None:
        """Return the next line without surrounding blanks; None at the end of the input. Raises KeyboardInterrupt."""
        self.requested, self._num_presses, self._is_at_prompt = False, 0, True
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        finally:
            self._is_at_prompt = False

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        self._num_presses += 1
        if self._is_at_prompt or self._num_presses > 2:
            raise KeyboardInterrupt
        self.requested = True


def converse(engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
    """Read a line, write an answer, until /exit or the end of the input. A refused turn is forgotten.

    Raises KeyboardInterrupt for Ctrl-C twice at the prompt; once keeps the conversation.
    """
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if isinstance(sys.stdin, TextIOWrapper):
        # a line that is no text is refused like another turn, and does not end the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say(_HELP, sys.stderr)
    ctrl_c, was_interrupted = _CtrlC(), False
    with ctrl_c.installed():
        while True:
            try:
                line = ctrl_c.read_line("> " if is_terminal else "")
            except KeyboardInterrupt:
                if was_interrupted or not is_terminal:
                    raise
                was_interrupted = True
                say("\nThe conversation goes on; Ctrl-C again, or /exit, ends it.", sys.stderr)
                continue
            was_interrupted = False
            if line is None or line == "/exit":
                return
            if line == "/clear":
                messages = list(start)
            elif line.startswith("/"):
                say(f"octavo: {line} is not a command; {_HELP}", sys.stderr)
            elif line:
                messages += _turn(engine, messages, line, params, ctrl_c)


def _turn(
    engine: LLMEngine, messages: list[dict[str, str]], line: str, params: SamplingParams, interrupt: Interrupt
) -> list[dict[str, str]]:
    """Respond to a line; return the messages that it adds to the conversation, none when it is refused."""
    turn = {"role": "user", "content": line}
    try:
        answer = _answer(engine, [*messages, turn], params, interrupt)
    except OctavoError as error:
        say(f"octavo: {error}", sys.stderr)
        return []
    return [turn, {"role": "assistant", "content": answer}]


def _answer(engine: LLMEngine, messages: list[dict[str, str]], params: SamplingParams, interrupt: Interrupt) -> str:
    """Write the model's response to standard output and return it; Ctrl-C ends it."""
    from octavo.cli.stream import stream

    pieces: list[str] = []
    screen = WordWrap(sys.stdout)
    for output in stream(engine, engine.render_chat(messages), params, interrupt):
        pieces.append(output.outputs[0].text)
        screen.write(pieces[-1])
    screen.flush()
    sys.stdout.write(" [stopped]\n" if interrupt.requested else "\n")
    return "".join(pieces)
