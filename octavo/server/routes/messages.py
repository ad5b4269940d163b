"""`POST /v1/messages`: conversations in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.core.outputs import RequestOutput
from octavo.server.errors import ApiError
from octavo.server.formats.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
)
from octavo.server.schema.messages import MessagesRequest
from octavo.server.sending import StreamEvent
from octavo.server.turn import ShimTurn

_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageUsage(Struct, frozen=True):
    """Token counts: those of the prompt that were in the prefix cache are not among `input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class ContentBlock(Struct, kw_only=True):
    """A block of the output: `text`, `thinking` or `tool_use`."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageResponse(Struct, kw_only=True):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class _Blocks:
    """The blocks of a message, and the events by which they grow. signature: the `signature` of blocks of reasoning."""

    def __init__(self, signature: str) -> None:
        self.blocks: list[ContentBlock] = []
        self._signature = signature
        self._is_open = False
        self._pieces: list[str] = []

    def add(self, event: OutputEvent) -> Iterator[StreamEvent]:
        match event:
            case TextDelta(text):
                if self._kind != "text":
                    yield from self._begin(ContentBlock(type="text", text=""))
                yield self._delta("text_delta", text=text)
            case ReasoningDelta(text):
                if self._kind != "thinking":
                    yield from self._begin(ContentBlock(type="thinking", thinking="", signature=""))
                yield self._delta("thinking_delta", thinking=text)
            case ToolCallBegin(_, call_id, name):
                yield from self._begin(ContentBlock(type="tool_use", id=call_id, name=name, input={}))
            case ToolCallDelta(_, arguments):
                yield self._delta("input_json_delta", partial_json=arguments)
            case ToolCallEnd():
                yield from self.end()

    def end(self) -> Iterator[StreamEvent]:
        if not self._is_open:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        if block.type == "text":
            block.text = text
        elif block.type == "tool_use":
            block.input = _object(text)
        else:
            block.thinking, block.signature = text, self._signature
            yield self._delta("signature_delta", signature=self._signature)
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    @property
    def _kind(self) -> str | None:
        return self.blocks[-1].type if self._is_open else None

    def _begin(self, block: ContentBlock) -> Iterator[StreamEvent]:
        yield from self.end()
        self.blocks.append(block)
        self._is_open, self._pieces = True, []
        begun = msgspec.structs.replace(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": begun}

    def _delta(self, kind: str, **piece: str) -> StreamEvent:
        self._pieces += piece.values()
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, **piece}}


class Message(ShimTurn[MessagesRequest]):
    """Return the next turn of a conversation as blocks of a message, whole or as a stream.

    A stream has the message as it begins, its blocks as they grow, and why it ends.
    """

    kind = MessagesRequest
    id_prefix = "msg_"
    end_of_stream = b""

    def begin(self) -> None:
        thinking = self.shim.thinking
        self._blocks = _Blocks(self.id)
        self._has_begun = False
        self._hides_reasoning = thinking is not None and thinking.display == "omitted"
        self._stop: dict[str, Any] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> MessageResponse:
        for _ in self.chunks(0, outputs[0]):
            pass
        for _ in self.last_chunks():
            pass
        return msgspec.structs.replace(self._message(), content=self._blocks.blocks, **self._stop)

    def chunks(self, index: int, output: RequestOutput) -> Iterator[StreamEvent]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._message(without_completion=True)}
            yield {"type": "ping"}
        [completion] = output.outputs
        for event in self.events(output, completion):
            if self._hides_reasoning and isinstance(event, ReasoningDelta):
                event = ReasoningDelta("")
            yield from self._blocks.add(event)
        if completion.finish_reason is not None:
            sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
            ends_turn = "end_turn" if sequence is None else "stop_sequence"
            reason = _STOP_REASONS.get(self.finish_reason(completion) or "", ends_turn)
            self._stop = {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def last_chunks(self) -> Iterator[StreamEvent]:
        yield from self._blocks.end()
        yield {"type": "message_delta", "delta": self._stop, "usage": self._usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + msgspec.json.encode(error.messages_body) + b"\n\n"

    def _message(self, *, without_completion: bool = False) -> MessageResponse:
        usage = self._usage(without_completion=without_completion)
        return MessageResponse(id=self.id, model=self.frame["model"], content=[], usage=usage)

    def _usage(self, *, without_completion: bool = False) -> MessageUsage:
        usage = self.usage(without_completion=without_completion)
        num_cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - num_cached, num_cached, usage.completion_tokens)


def _object(text: str) -> dict[str, Any]:
    """Return the object that a JSON text is; empty where it was cut."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
