"""Streams the text of one request from an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from octavo.core.adapter import LoRARequest
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.interrupt import Interrupt
from octavo.errors import InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput
    from octavo.engine.llm_engine import LLMEngine


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
