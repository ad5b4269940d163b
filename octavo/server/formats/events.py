"""What a model has written, piece by piece. Every API writes these events in a shape of its own."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class TextDelta(Struct, frozen=True):
    """A piece of the text that is meant for the user."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


class ToolCallBegin(Struct, frozen=True):
    """The begin of a call: its index among the calls of a choice, its id, and the name of the tool.

    is_custom: of a custom tool; the pieces make its input.
    """

    index: int
    id: str
    name: str
    is_custom: bool = False


class ToolCallDelta(Struct, frozen=True):
    """A piece of the arguments of a call. The pieces of a call make JSON, unless the text was cut; those of a
    custom tool make its input."""

    index: int
    arguments: str
    is_custom: bool = False


class ToolCallEnd(Struct, frozen=True):
    """The end of a call. is_cut: the text ended within it, so that arguments are missing."""

    index: int
    is_cut: bool = False


OutputEvent = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallDelta | ToolCallEnd


class ReadCall(Struct):
    """A call of a tool: its arguments are JSON, as text; of a custom tool they are its input."""

    id: str
    name: str
    arguments: str = ""
    is_custom: bool = False


class ReadOutput(Struct):
    """The whole output of a choice. text and reasoning are None where there are none."""

    text: str | None
    reasoning: str | None
    calls: list[ReadCall]


def joined(events: Iterable[OutputEvent]) -> ReadOutput:
    """Return what the events of a choice say together."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ReadCall] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallBegin(_, call_id, name, is_custom):
                calls.append(ReadCall(call_id, name, is_custom=is_custom))
                arguments.append([])
            case ToolCallDelta(index, piece):
                arguments[index].append(piece)
            case ToolCallEnd():
                pass
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return ReadOutput("".join(texts) or None, "".join(reasoning) or None, calls)
