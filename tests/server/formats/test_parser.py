"""The parser of what models write."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from octavo.server.formats.events import ReadCall, ReadOutput, ToolCallEnd, joined
from octavo.server.formats.format import Format, format_of, templates
from octavo.server.formats.marks import Mark, Marks
from octavo.server.formats.parser import OutputParser

CHATML = format_of('<tool_call> "arguments" </think>')


def output_of(parser: OutputParser, pieces: list[str]) -> ReadOutput:
    last = len(pieces) - 1
    return joined(event for place, piece in enumerate(pieces) for event in parser.feed(piece, is_last=place == last))


def read(
    form: Format | None, pieces: list[str], tools: Mapping[str, Mapping[str, Any]] | None = None, **options: bool
) -> ReadOutput:
    assert form is not None
    assert form.calls is not None
    output = output_of(OutputParser(form, tools or {}, **options), pieces)
    for call in output.calls:
        assert form.calls.id_form or len(call.id) == (form.calls.id_chars or len("call_") + 24)
        call.id = ""
    return output


def cuttings(text: str, count: int = 20) -> list[list[str]]:
    draw = random.Random(0)
    found = [list(text)]
    for _ in range(count):
        cuts = sorted(draw.sample(range(len(text)), min(len(text), 6)))
        found.append([text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return found


def test_text_reasoning_and_calls_are_separated_however_the_text_is_divided() -> None:
    text = (
        "<think>\nhm hm\n</think>\n\nHello you \n\n"
        '<tool_call>\n{"name": "f", "arguments": {"city": "S\\"</tool_call>F"}}\n</tool_call>\n'
        '<tool_call>{"arguments": null, "name": "b"}</tool_call> tail <tool_call>oops</tool_call>'
    )
    whole = read(CHATML, [text])
    assert whole == ReadOutput(
        "Hello you \n\ntail <tool_call>oops",
        "hm hm",
        [ReadCall("", "f", '{"city": "S\\"</tool_call>F"}'), ReadCall("", "b", "{}")],
    )
    for pieces in cuttings(text):
        assert read(CHATML, pieces) == whole


def test_text_without_marks_is_left_as_it_is() -> None:
    text = "  a <tool b\n\n < think>  \n"
    for pieces in cuttings(text):
        assert read(CHATML, pieces) == ReadOutput(text, None, [])


def test_reasoning_that_the_prompt_has_opened_ends_at_its_mark() -> None:
    assert read(CHATML, ["so\n</thi", "nk>\n\nyes"], begins_in_reasoning=True) == ReadOutput("yes", "so", [])
    assert read(CHATML, ["so</think>yes"], reads_reasoning=False) == ReadOutput("so</think>yes", None, [])


@pytest.mark.parametrize(
    ("name", "begin", "call"),
    [
        ("hermes", "", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("glm45", "", "<tool_call>f</tool_call>"),
        ("minimax_m2", "<minimax:tool_call>", '<invoke name="f"></invoke></minimax:tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"),
    ],
)
def test_a_call_of_a_known_tool_ends_reasoning_that_has_no_end(name: str, begin: str, call: str) -> None:
    form = format_of(None, None, name, "deepseek_r1")
    thought = f"I could {begin} or <tool_call>"
    for pieces in cuttings(f"<think>{thought}\n{begin}\n{call}\nDone."):
        assert read(form, pieces, {"f": {}}) == ReadOutput("Done.", thought, [ReadCall("", "f", "{}")])
    for pieces in cuttings(f"<think>{thought}\n{begin}\n{call}</think>\nDone."):
        found = read(form, pieces, {"g": {}})
        assert found == ReadOutput("Done.", f"{thought}\n{begin}\n{call}", [])


def test_the_longer_of_two_marks_at_one_place_is_found_however_the_text_is_cut() -> None:
    marks = Marks(map(Mark.of, ("```", "```json")))
    for text, end in (("```json", 7), ("```js", 3)):
        assert [marks.search(text[:cut], 0, False)[1] for cut in range(1, min(len(text), end + 1))] == [None] * min(
            len(text) - 1, end
        )
        start, found = marks.search(f"{text} ", 0, False)
        assert (start, found and found.end) == (0, end)


@pytest.mark.parametrize("name", ["glm45", "k2_horizon", "kimi_k3", "gemma4"])
def test_special_tokens_that_begin_marks_of_calls_are_left_out_of_texts_alone(name: str) -> None:
    form = format_of(None, None, name, "none")
    assert form is not None
    assert form.calls is not None
    close = form.calls.closes[0].spelled()
    body = {"gemma4": "{}", "kimi_k3": ""}.get(name, "")
    call = f"{form.calls.opens[0].spelled(name='f', index='1')}{body}{close}"
    drops = ["<tool_call>", "</tool_call>", "<ifm|tool_call>", "<|open|>", "<|close|>", "<|sep|>", "<|tool_call>"]
    for pieces in cuttings(f"a {drops[0]} b{call}"):
        output = output_of(OutputParser(form, {"f": {}}, drops=drops), pieces)
        assert [each.name for each in output.calls] == ["f"]
        assert (output.text or "").split() == ["a", "b"]


def test_channels_that_come_again_are_not_ended_by_calls() -> None:
    form = templates()["gpt_oss"].format("gpt_oss")
    text = "<|channel|>analysis<|message|>a<|channel|>commentary to=functions.f<|message|>{}<|end|>"
    assert output_of(OutputParser(form, {"f": {}}), [text]).calls == []


def test_reasoning_that_is_to_stay_in_the_text_keeps_its_marks() -> None:
    form = format_of(None, None, "minimax_m2", "minimax_m2_append_think")
    assert form is not None
    for pieces in cuttings('hm</think>\n\nYes. <minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>'):
        found = read(form, pieces, {"f": {}}, begins_in_reasoning=True)
        assert found == ReadOutput("<think>hm</think>\n\nYes.", None, [ReadCall("", "f", "{}")])
    parser = OutputParser(form, None, begins_in_reasoning=True, drops=["<think>", "</think>", "<eos>"])
    assert output_of(parser, ["hm</think>Yes.<eos>"]) == ReadOutput("<think>hm</think>Yes.", None, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "a}"}'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1, "y": "a}"}'),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1, "y": "a}"}'),
        ("pythonic", "[f(x=1, y='a)')"),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1, "y": {}}'),
    ],
)
def test_a_call_counts_when_the_text_does_not_end_within_it(name: str, text: str) -> None:
    form = format_of(None, None, name, "none")
    assert form is not None
    for end in range(len(text) + 1):
        parser = OutputParser(form, {"f": {}})
        events = parser.feed(text[:end], is_last=True)
        ends = [event.is_cut for event in events if isinstance(event, ToolCallEnd)]
        # behind the first of these marks an end is a call without arguments; the second needs no mark behind it
        is_whole = end == len(text) or text[:end].endswith("<｜tool▁sep｜>") or "</function>" in text[:end]
        assert parser.has_called == is_whole, text[:end]
        assert ends in ([], [not is_whole])
