"""Brings what the core produced to the open requests, and ends those that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, StopSequence, id_in_use
from octavo.core.outputs import RequestOutput
from octavo.core.step import PromptLogprobs
from octavo.engine.output.open_request import OpenRequest
from octavo.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.output.request_counts import RequestCounts

_POSITIONS_OF_TURN: Final = 128
"""Positions of prompts whose log-probabilities are processed before the event loop does other work."""

_OUTPUTS_OF_TURN: Final = 128
"""Outputs that are processed before the event loop does other work: each may be written to its stream at once."""


class Processed(NamedTuple):
    """The requests that a step has changed, and the sequences whose text met a stop string, which the core must end."""

    changed: list[OpenRequest]
    stops: list[StopSequence]

    def read(self) -> list[RequestOutput]:
        """Return what is new for the callers of the changed requests."""
        return [output for request in self.changed if (output := request.output()) is not None]


class OutputProcessor:
    """The open requests as their callers see them. One thread at a time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        counts: RequestCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
        stream_interval: int = 1,
    ) -> None:
        """stream_interval: tokens of a sequence that a stream's output has at least, but for the first and the last."""
        self._stream_interval = stream_interval
        self._tokenizer = tokenizer
        self._counts = counts
        self._clock = clock
        self._requests: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineCoreRequest, prompt: str | None) -> OpenRequest:
        """Open a request; `prompt` is its text where there is one. Raises InvalidRequest when its id is in use."""
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        opened = self._requests[request.request_id] = OpenRequest(
            request, prompt, self._tokenizer, self._stream_interval
        )
        return opened

    def process(self, outputs: Iterable[EngineCoreOutput]) -> Processed:
        """Add the outputs of a step to their requests. Outputs of a request that has ended here are dropped."""
        processed = Processed([], [])
        now = self._clock()
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            processed.changed.append(request)
            processed.stops.extend(request.take(output))
            if output.deltas:
                last = request.note_tokens(now)
                if self._counts is not None and last is not None:
                    num_sequences = len([1 for delta in output.deltas if delta.token_ids])
                    self._counts.inter_token_latency.observe(now - last, num_sequences)
            if request.finished:
                self._end(request)
            request.notify()
        return processed

    def abort(self, request_id: str) -> OpenRequest | None:
        """End a request before its time, and return it; None when it is not open."""
        request = self._requests.get(request_id)
        if request is not None:
            request.end("abort")
            self._end(request)
            request.notify()
        return request

    def to_resume(self, request_id: str) -> EngineCoreRequest | None:
        """Return an open request with what `process` has got of it, for another core to go on; None when not open.

        That core draws again, and alike, what the first one had drawn and `process` did not get. What the first one
        sends later must not be processed any more.
        """
        request = self._requests.get(request_id)
        return None if request is None else request.to_resume(self._clock())

    def fail(self) -> None:
        """Close all requests of an engine that has died; they count as ended with an error."""
        for request in list(self._requests.values()):
            self._end(request)
            if request.on_change is not None:
                request.on_change()

    def _end(self, request: OpenRequest) -> None:
        del self._requests[request.request_id]
        metrics = request.metrics
        if metrics.finished_time is None:  # the front ended it, the core did not
            metrics.end(self._clock(), request.how_ended)
        if self._counts is not None and request.refused is not None:
            self._counts.observe_refusal(request.refused.code)
        elif self._counts is not None:
            self._counts.observe_request(
                metrics,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated_tokens=request.num_generated_tokens,
                finish_reasons=request.finish_reasons,
            )


def in_turns(outputs: list[EngineCoreOutput]) -> Iterator[list[EngineCoreOutput]]:
    """Yield the outputs of a step in lists of 128 at most, with the log-probabilities of 128 prompt positions at most.

    Outputs without any come first. Of a prompt that is cut, the last part has everything else.
    """
    turn: list[EngineCoreOutput] = []
    room = _POSITIONS_OF_TURN
    for output in sorted(outputs, key=_num_positions):
        for part in _parts(output):
            if _num_positions(part) > room or len(turn) == _OUTPUTS_OF_TURN:
                yield turn
                turn, room = [], _POSITIONS_OF_TURN
            turn.append(part)
            room -= _num_positions(part)
    yield turn


def _num_positions(output: EngineCoreOutput) -> int:
    return 0 if output.prompt_logprobs is None else len(output.prompt_logprobs.tokens)


def _parts(output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    logprobs = output.prompt_logprobs
    if logprobs is None or len(logprobs.tokens) <= _POSITIONS_OF_TURN:
        yield output
        return
    for start in range(0, len(logprobs.tokens), _POSITIONS_OF_TURN):
        tokens = logprobs.tokens[start : start + _POSITIONS_OF_TURN]
        part = PromptLogprobs(first_position=logprobs.first_position + start, tokens=tokens)
        if start + len(tokens) == len(logprobs.tokens):
            yield msgspec.structs.replace(output, prompt_logprobs=part)
        else:
            yield EngineCoreOutput(request_id=output.request_id, deltas=[], finished=False, prompt_logprobs=part)
