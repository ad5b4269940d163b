"""Events for the pieces of a model's output. Every API writes these events in a shape of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from typing import Any, Final

import msgspec
from msgspec import Struct


class TextDelta(Struct, frozen=True):
    """A piece of the text that is meant for the user."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """A piece of the model's reasoning."""

    text: str


class ToolCallBegin(Struct, frozen=True):
    """The begin of a call: its index among the calls of a choice, its id, and the name of the tool.

    is_custom: the tool is a custom one, and the joined pieces are its input.
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
    """Return the whole output of a choice from its events."""
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


_BEGIN: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_WHOLE: Final = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|{_HIGH}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\]|\\[^u])))*'
)
"""Complete characters of a JSON string: half of a surrogate pair is not matched before the other half is there."""
_LONE: Final = re.compile("[\ud800-\udfff]")


class CustomInputs:
    """Replaces the arguments of calls of these tools by their input, piece by piece; other events stay as they are."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._input: _Input | None = None

    def read(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        """Return the events with the inputs of custom tools instead of their arguments."""
        found: list[OutputEvent] = []
        for event in events:
            match event:
                case ToolCallBegin(name=name) if name in self._names:
                    self._input = _Input()
                    found.append(msgspec.structs.replace(event, is_custom=True))
                case ToolCallDelta(index, piece) if self._input is not None:
                    if text := self._input.feed(piece):
                        found.append(ToolCallDelta(index, text, is_custom=True))
                case ToolCallEnd(index) if self._input is not None:
                    if text := self._input.rest():
                        found.append(ToolCallDelta(index, text, is_custom=True))
                    found.append(event)
                    self._input = None
                case _:
                    found.append(event)
        return found


class _Input:
    """Reads the text out of the JSON `{"input": TEXT}`, which comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False

    def feed(self, piece: str) -> str:
        self._held += piece
        if not self._is_open:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._is_open, self._held = True, self._held[begin.end() :]
        end = _WHOLE.match(self._held).end()  # type: ignore[union-attr]
        text, self._held = self._held[:end], self._held[end:]
        decoded: str = json.loads(f'"{text}"', strict=False)
        return _LONE.sub("\ufffd", decoded)

    def rest(self) -> str:
        """Return the input when the arguments have another form: the text of the key `input`, else the arguments
        themselves."""
        if self._is_open:
            return "" if self._held.startswith('"') else self._held
        try:
            found = msgspec.json.decode(self._held, type=dict[str, Any]).get("input")
        except msgspec.DecodeError:
            found = None
        return found if isinstance(found, str) else self._held
