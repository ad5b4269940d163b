"""`octavo chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from octavo.cli.options import Given, heading, with_options
from octavo.cli.start import load, log_quietly, mention_demonstration_model
from octavo.cli.terminal import WordWrap, say
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.interrupt import Interrupt, interrupt_handler
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

_HELP = "/exit or Ctrl-C twice ends, /clear starts a new conversation, Ctrl-C stops an answer."


@with_options(SamplingParams, EngineArgs, model="positional", without=("n",))
def chat(
    *,
    system: Annotated[
        str | None, Parameter(help="Message that tells the model who it is.", group=heading("Prompt"))
    ] = None,
    given: Given,
) -> int:
    """Talk to a model; each answer is written as it is generated."""
    args = given.arguments(EngineArgs)
    given.sampling({"max_tokens": None})  # raises for wrong flags before a model is loaded
    log_quietly(args)
    mention_demonstration_model(args)
    engine = load(args)
    params = given.sampling({"max_tokens": None} | engine.generation_defaults)
    converse(engine, params, system)
    return 0


class _CtrlC(Interrupt):
    """Ctrl-C during a conversation: at the prompt it raises KeyboardInterrupt, during a response it requests its end.

    Three during one response raise KeyboardInterrupt, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_at_prompt = False
        self._num_presses = 0

    def read_line(self, prompt: str) -> str | None:
        """Return the next line without surrounding blanks; None at the end of the input. Raises KeyboardInterrupt."""
        self.requested, self._num_presses, self._is_at_prompt = False, 0, True
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        finally:
            self._is_at_prompt = False

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Take a press of Ctrl-C."""
        self._num_presses += 1
        if self._is_at_prompt or self._num_presses > 2:
            raise KeyboardInterrupt
        self.requested = True


def converse(engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
    """Read lines and write responses, until /exit or the end of the input. A refused turn is dropped.

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
    with interrupt_handler(ctrl_c.handle):
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
