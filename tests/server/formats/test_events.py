"""The input of a custom tool is the text in the arguments that the model writes, however these are cut."""

from __future__ import annotations

import json

import pytest

from octavo.server.formats.events import (
    CustomInputs,
    OutputEvent,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    joined,
)

TEXT = 'a "b"\\\n\té “\U0001f600” \x00/'


def events_of(arguments: str, size: int, name: str = "patch") -> list[OutputEvent]:
    pieces = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    return [ToolCallBegin(0, "id", name), *(ToolCallDelta(0, piece) for piece in pieces), ToolCallEnd(0)]


def read(arguments: str, size: int) -> str:
    """Return the input of a call whose arguments come in pieces of `size` characters, each in a batch of its own."""
    inputs = CustomInputs(["patch"])
    output = joined(found for event in events_of(arguments, size) for found in inputs.read([event]))
    assert output.calls[0].is_custom
    return output.calls[0].arguments


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_input_is_the_same_however_the_arguments_are_cut(size: int, is_ascii: bool) -> None:
    assert read(json.dumps({"input": TEXT}, ensure_ascii=is_ascii), size) == TEXT
    assert read(' {\n"input" :' + json.dumps(TEXT), size) == TEXT


def test_pieces_of_the_input_come_as_they_are_written() -> None:
    inputs = CustomInputs(["patch"])
    inputs.read([ToolCallBegin(0, "id", "patch")])
    assert inputs.read([ToolCallDelta(0, '{"inp')]) == []
    assert inputs.read([ToolCallDelta(0, 'ut": "ab')]) == [ToolCallDelta(0, "ab", is_custom=True)]
    assert inputs.read([ToolCallDelta(0, "c\\")]) == [ToolCallDelta(0, "c", is_custom=True)]
    assert inputs.read([ToolCallDelta(0, 'n"')]) == [ToolCallDelta(0, "\n", is_custom=True)]


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "ab', "ab"),
        ('{"n": 1, "input": "ab"}', "ab"),
        ('{"patch": "ab"}', '{"patch": "ab"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        (r'{"input": "a\ud83db"}', "a\ufffdb"),
        (r'{"input": "a\ud83d\u0062\udc00"}', "a\ufffdb\ufffd"),
        (r'{"input": "a\x"}', r'a\x"}'),
    ],
)
def test_other_arguments_are_an_input_too(arguments: str, expected: str, size: int) -> None:
    assert read(arguments, size) == expected


def test_calls_of_functions_and_texts_stay_as_they_are() -> None:
    inputs = CustomInputs(["patch"])
    inputs.read(events_of('{"input": "a"}', 3))
    others = [TextDelta("a"), *events_of('{"input": "a"}', 3, name="f")]
    assert inputs.read(others) == others
