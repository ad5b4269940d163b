"""`octavo chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from octavo.cli.options import Given, heading, with_options
from octavo.cli.start import load, log_quietly, mention_demonstration_model
from octavo.config.args import EngineArgs
from octavo.core.sampling_params import SamplingParams
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

_HELP = "/exit ends, /clear starts a new conversation, Ctrl-C stops an answer."


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


def converse(engine: LLMEngine, params: SamplingParams, system: str | None) -> None:
    """Read a line, write an answer, until /exit or the end of the input. A refused turn is forgotten."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if isinstance(sys.stdin, TextIOWrapper):
        # a line that is no text is refused like another turn, and does not end the conversation
        sys.stdin.reconfigure(errors="surrogateescape")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_HELP, file=sys.stderr)
    while (line := _read_line("> " if is_terminal else "")) is not None:
        if not line:
            continue
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(start)
            continue
        if line.startswith("/"):
            print(f"octavo: {line} is not a command; {_HELP}", file=sys.stderr)
            continue
        turn = {"role": "user", "content": line}
        try:
            answer = _answer(engine, [*messages, turn], params)
        except OctavoError as error:
            print(f"octavo: {error}", file=sys.stderr)
            continue
        messages += [turn, {"role": "assistant", "content": answer}]


def _read_line(prompt: str) -> str | None:
    """The next line without surrounding blanks; None at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _answer(engine: LLMEngine, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Write the model's answer to standard output and return it; what was written before Ctrl-C is the answer."""
    from octavo.cli.stream import stream
    from octavo.engine.interrupt import deferred_interrupt

    pieces: list[str] = []
    with deferred_interrupt() as interrupt:
        for output in stream(engine, engine.render_chat(messages), params, interrupt):
            pieces.append(output.outputs[0].text)
            sys.stdout.write(pieces[-1])
            sys.stdout.flush()
    sys.stdout.write(" [stopped]\n" if interrupt.requested else "\n")
    return "".join(pieces)
