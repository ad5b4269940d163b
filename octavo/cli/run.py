"""`octavo run "prompt"`: continue a text, written as it is generated."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from octavo.cli.options import Given, heading, with_options
from octavo.cli.start import ends_at_interrupt, log_quietly, mention_demonstration_model, mention_memory
from octavo.config.args import EngineArgs
from octavo.core.prompt import checked_text
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

_MAX_TOKENS = 256
"""Unless told otherwise: a model that never stops by itself should not fill a long context."""


@with_options(SamplingParams, EngineArgs, without=("served_model_name", "disable_log_stats"))
def run(
    prompt: Annotated[
        str | None, Parameter(help="Text to continue; without it, standard input is read.", group=heading("Prompt"))
    ] = None,
    *,
    given: Given,
) -> int:
    """Continue a text, written to standard output as it is generated."""
    args = given.arguments(EngineArgs)
    if prompt is None:
        if sys.stdin.isatty():
            raise InvalidRequest('there is no prompt; write one, as in octavo run "Once upon a time"', field="prompt")
        prompt = _standard_input().removesuffix("\n")
    checked_text(prompt, "prompt")
    given.sampling({})  # what is wrong with the flags is said before a model is loaded
    log_quietly(args)
    mention_demonstration_model(args)

    with ends_at_interrupt():
        from octavo.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_args(args)
    mention_memory(engine)
    room = max(1, engine.ready.max_model_len - len(engine.tokenizer.encode(prompt)))
    params = given.sampling({"max_tokens": min(_MAX_TOKENS, room)} | engine.generation_defaults)
    if params.n == 1:
        _write_one(engine, prompt, params)
    else:
        _write_several(engine, prompt, params)
    return 0


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is no {error.encoding} text: the byte 0x{error.object[error.start]:02x} at position "
            f"{error.start} starts no character; convert it, for instance with iconv -t UTF-8",
            field="prompt",
        ) from error


def _write_one(engine: LLMEngine, prompt: str, params: SamplingParams) -> None:
    from octavo.cli.stream import stream

    outputs = stream(engine, prompt, params)
    sys.stdout.write(prompt)
    sys.stdout.flush()
    for output in outputs:
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _write_several(engine: LLMEngine, prompt: str, params: SamplingParams) -> None:
    """Texts that grow together cannot be told apart on one screen: each is written when all are there."""
    from octavo.cli.stream import stream

    texts: dict[int, str] = {}
    for output in stream(engine, prompt, params):
        for completion in output.outputs:
            texts[completion.index] = texts.get(completion.index, "") + completion.text
    for index, text in sorted(texts.items()):
        sys.stdout.write(f"[{index + 1}] {prompt}{text}\n")
