"""Text as it comes, from an engine in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.errors import InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput
    from octavo.engine.llm_engine import LLMEngine


class Interrupt:
    """True once Ctrl-C was pressed; pressing it again raises KeyboardInterrupt as usual."""

    def __init__(self) -> None:
        self.was_requested = False

    def __bool__(self) -> bool:
        return self.was_requested


@contextmanager
def interrupt_as_flag() -> Iterator[Interrupt]:
    """Inside, the first Ctrl-C sets a flag instead of tearing through a step, so that the engine stays usable."""
    interrupt = Interrupt()
    previous = signal.getsignal(signal.SIGINT)

    def handle(signal_number: int, frame: FrameType | None) -> None:
        if interrupt.was_requested:
            raise KeyboardInterrupt
        interrupt.was_requested = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def stream(
    engine: LLMEngine, prompt: str | Prompt, params: SamplingParams, interrupt: Interrupt | None = None
) -> Iterator[RequestOutput]:
    """Outputs of one request, each with what is new in it; ends early, and aborts the request, when interrupted.

    Raises InvalidRequest when it is refused, RequestFailed when it ends with an error.
    """
    request_id = f"cli-{uuid4().hex[:12]}"
    engine.add_request(request_id, prompt, msgspec.structs.replace(params, output_kind=OutputKind.DELTA))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                error = output.error
                raise InvalidRequest(error.message) if error.is_client_error else RequestFailed(error.message)
            yield output
        if interrupt:
            engine.abort_request(request_id)
            while engine.has_unfinished_requests():
                engine.step()
