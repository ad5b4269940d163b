"""Code shared by commands that load a model into this process: messages, settings, and a request with streamed text."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from octavo.cli.terminal import columns, say
from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.core.adapter import LoRARequest
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.interrupt import Interrupt, interrupt_handler
from octavo.errors import InvalidRequest, RequestFailed
from octavo.executor.executor import import_worker
from octavo.logging import set_up

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput
    from octavo.engine.llm_engine import LLMEngine


def mention_demonstration_model(args: EngineArgs) -> None:
    """Write a line to stderr when the demonstration model is used."""
    if args.model == BUILTIN_MODEL:
        say(
            f"{BUILTIN_MODEL} is a demonstration model of a few million parameters; name a larger one for useful text.",
            sys.stderr,
        )


def with_adapter(args: EngineArgs, folder: str | None) -> tuple[EngineArgs, LoRARequest | None]:
    """Return the arguments for requests with the adapter in a folder, and the adapter; None for no folder."""
    if folder is None:
        return args, None
    return dataclasses.replace(args, enable_lora=True), LoRARequest("lora", 1, folder)


def log_quietly(args: EngineArgs) -> None:
    """Log warnings and errors only, unless another level is given: the terminal shows generated text."""
    set_up("warning" if args.log_level == EngineArgs.log_level else args.log_level)


def load(args: EngineArgs, prompt: str | None = None) -> LLMEngine:
    """Return an engine that logs quietly, and write the use of its memory to stderr; `octavo explain` shows the whole
    plan. Raises InvalidRequest where `prompt` is empty and its model begins texts with no token.
    """
    log_quietly(args)
    mention_demonstration_model(args)
    with ends_at_interrupt():
        from octavo.engine.input.input_processor import open_tokenizer
        from octavo.engine.llm_engine import LLMEngine, in_process_config

        config = in_process_config(args)  # wrong arguments are refused before torch is imported
        if prompt == "" and not open_tokenizer(config.model)[0].encode(prompt):
            raise InvalidRequest(
                'the prompt is empty; give one, as in octavo run "Once upon a time", or pipe a text into the command',
                field="prompt",
            )
        import_worker()
        engine = LLMEngine.build(config)
    bar = engine.ready.plan_bar
    if sys.stderr.isatty() and len(bar.partition("\n")[0]) <= columns(sys.stderr):
        say(bar, sys.stderr)
    say(f"memory: {engine.ready.plan_summary}", sys.stderr)
    return engine


def ends_at_interrupt() -> AbstractContextManager[None]:
    """Within the `with`, Ctrl-C ends the process at once: some libraries that load a model swallow exceptions."""
    return interrupt_handler(signal.SIG_DFL)


def stream(
    engine: LLMEngine,
    prompt: str | Prompt,
    params: SamplingParams,
    interrupt: Interrupt | None = None,
    lora_request: LoRARequest | None = None,
) -> Iterator[RequestOutput]:
    """Return the outputs of one request, each with its new text; an interrupt aborts the request and ends them.

    Raises InvalidRequest at once when it is refused; the iterator raises RequestFailed when it ends with an error.
    """
    request_id = f"cli-{uuid4().hex[:12]}"
    params = msgspec.structs.replace(params, output_kind=OutputKind.DELTA)
    engine.add_request(request_id, prompt, params, lora_request=lora_request)
    return _outputs(engine, request_id, interrupt)


def _outputs(engine: LLMEngine, request_id: str, interrupt: Interrupt | None) -> Iterator[RequestOutput]:
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                raise (InvalidRequest if output.error.is_client_error else RequestFailed)(output.error.message)
            yield output
        if interrupt is not None and interrupt.requested:
            engine.abort_request(request_id)
