"""`octavo run [MODEL] "prompt"`: continue a text, written as it is generated."""

from __future__ import annotations

import sys
from contextlib import closing
from os.path import exists, expanduser, isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from octavo.cli.options import Given, heading, with_options
from octavo.cli.pace import Pace
from octavo.cli.start import load, stream, with_adapter
from octavo.cli.terminal import WordWrap, as_utf_8, say
from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.config.checkpoint import CONFIG
from octavo.config.hub import is_hub_name
from octavo.config.model_names import is_short_name
from octavo.config.released.mistral import is_native
from octavo.core.adapter import LoRARequest
from octavo.core.prompt import checked_text
from octavo.core.sampling_params import SamplingParams
from octavo.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

_MAX_TOKENS = 256
"""The default of max_tokens: a model that never stops by itself should not fill a long context."""


@with_options(SamplingParams, EngineArgs)
def run(
    model_or_prompt: Annotated[
        str | None,
        Parameter(
            help="The model when a prompt follows: a hub name, a directory, a GGUF file or octavo-tiny. Else the text "
            "to continue.",
            group=heading("Prompt"),
        ),
    ] = None,
    /,
    prompt: Annotated[
        str | None, Parameter(help="Text to continue; without it, standard input is read.", group=heading("Prompt"))
    ] = None,
    *,
    lora: Annotated[
        str | None, Parameter(help="Folder of an adapter (LoRA, as PEFT saves it) to use.", group=heading("Prompt"))
    ] = None,
    verbose: Annotated[
        bool,
        Parameter(
            help="Write at the end how many tokens the text has and how fast they came.",
            group=heading("Prompt"),
            negative="",
        ),
    ] = False,
    given: Given,
) -> None:
    """Continue a text, written to standard output as it is generated."""
    model, prompt = _model_and_prompt(model_or_prompt, prompt, given.values.get("model"))
    given = given if model is None else msgspec.structs.replace(given, values={**given.values, "model": model})
    args, adapter = with_adapter(given.arguments(EngineArgs), lora)
    prompt = checked_text(_standard_input(args.model) if prompt is None else as_utf_8(prompt), "prompt")
    given.sampling({"max_tokens": None})  # raises for wrong flags before a model is loaded
    try:
        engine = load(args, prompt)
    except CheckpointError as error:
        if model is None or _is_surely_a_model(model):
            raise
        raise CheckpointError(f"{error} (if {model} is a part of the prompt, put all of that into quotes)") from error
    room = max(1, engine.ready.max_model_len - len(engine.tokenizer.encode(prompt)))
    # so that an impossible min_tokens is refused because of the context, not of this default
    most = min(_MAX_TOKENS, room) if given.values.get("min_tokens", 0) <= room else None
    params = given.sampling({"max_tokens": most} | engine.generation_defaults)
    if params.n == 1:
        pace = _write_one(engine, prompt, params, adapter)
    else:
        pace = _write_several(engine, prompt, params, adapter)
    if verbose:
        say(f"({pace})", sys.stderr)


def _model_and_prompt(first: str | None, prompt: str | None, model: str | None) -> tuple[str | None, str | None]:
    """Return the model and the prompt that the words of the command give; None for one that they leave out.

    model: the value of --model.
    """
    if first is None:
        return model, prompt
    if prompt is None:
        return (first, None) if model is None and _is_surely_a_model(first) else (model, first)
    if model is not None:
        raise InvalidRequest(
            f"there are two models, {first} and --model {model}; leave out one of them, or put a prompt of several "
            "words into quotes",
            field="model",
        )
    if _is_surely_a_model(first) or is_hub_name(first) or exists(expanduser(first)):
        return first, prompt
    raise InvalidRequest(
        f"{first!r} before the prompt names no model (a hub name, a directory, a GGUF file or {BUILTIN_MODEL}); put a "
        "prompt of several words into quotes",
        field="model",
    )


def _is_surely_a_model(word: str) -> bool:
    """Return whether a word can only be a model, not a text to continue."""
    place = expanduser(word)
    # of os.path, because those of Path raise OSError for a text that is longer than names of files
    is_here = (isdir(place) and _has_model(Path(place))) or (place.endswith(".gguf") and isfile(place))
    return word == BUILTIN_MODEL or is_here or is_short_name(word) or ("/" in word and is_hub_name(word))


def _has_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or is_native(folder) or any(folder.glob("*.gguf"))


def _standard_input(model: str) -> str:
    if sys.stdin.isatty():
        named = "" if model == BUILTIN_MODEL else f"{model} "
        raise InvalidRequest(
            f'there is no prompt; write one, as in octavo run {named}"Once upon a time"', field="prompt"
        )
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is no {error.encoding} text: the byte 0x{error.object[error.start]:02x} at position "
            f"{error.start} starts no character; convert it, for instance with iconv -t UTF-8",
            field="prompt",
        ) from error


def _write_one(engine: LLMEngine, prompt: str, params: SamplingParams, adapter: LoRARequest | None = None) -> Pace:
    pace = Pace()
    outputs = stream(engine, prompt, params, lora_request=adapter)
    with closing(WordWrap(sys.stdout)) as screen:
        screen.write(prompt)
        for output in outputs:
            screen.write(output.outputs[0].text)
            pace.note(output.num_generated_tokens)
    sys.stdout.write("\n")
    return pace


def _write_several(engine: LLMEngine, prompt: str, params: SamplingParams, adapter: LoRARequest | None = None) -> Pace:
    """Write all texts when they are complete: on one screen, texts that grow together cannot be distinguished."""
    texts: dict[int, str] = {}
    pace = Pace()
    for output in stream(engine, prompt, params, lora_request=adapter):
        pace.note(output.num_generated_tokens)
        for completion in output.outputs:
            texts[completion.index] = texts.get(completion.index, "") + completion.text
    for index, text in sorted(texts.items()):
        say(f"[{index + 1}] {prompt}{text}")
    return pace
