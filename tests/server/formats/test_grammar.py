"""Grammars of calls: what they admit is read back as calls of these tools, however the text is cut."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.builtin import model_directory
from octavo.core.prompt import Prompt
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.formats.events import ReadOutput, joined
from octavo.server.formats.format import Field, Format, ResponseTemplate, templates
from octavo.server.formats.grammar import CallGrammar
from octavo.server.formats.parser import OutputParser
from octavo.server.formats.reading import ModelFormat
from octavo.server.schema.chat import ChatCompletionRequest

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["°C", 'a"b']},
        "on": {"type": "boolean"},
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/y"}, "maxItems": 3}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "on"],
    "additionalProperties": False,
    "$defs": {"y": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get-weather.now", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS: dict[str, dict[str, Any]] = {"get-weather.now": WEATHER, "now": NOTHING}
CLOSERS = (
    '"',
    '"}',
    "}",
    "]",
    ")",
    "</arg_value>",
    "\n</parameter>",
    "</parameter>",
    "</｜DSML｜parameter>",
    "</｜DSML｜ parameter>",
    "</ifm|arg_value>",
    "<|close|>argument<|sep|>",
    "</steptml:parameter>",
    "</atem:parameter>",
    "</param>",
    '<|"|>',
    "<escape>",
    "</think>",
    "</tool_call>",
    "</tool_call:opensource>",
    "</arg_value:opensource>",
    "<|end|>",
    "<|call|>",
)
FORMATS = [name for name, template in templates().items() if "tool_calls" in template.fields]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(model_directory())


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer((model_directory() / "tokenizer.json").read_text(), n_vocab=3072, eos_token=[0])


def form_of(name: str) -> Format:
    form = templates()[name].format(name)
    if form.reasoning is not None:
        return form
    return Format(name, templates()["think"].format("think").reasoning, form.calls, form.drops)


def asked(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required", **fields}
    return decode(json.dumps(body).encode(), ChatCompletionRequest)


def walk(grammar: str, seed: int, prefix: str = "", most_tokens: int = 400) -> str | None:
    """Return a random text of a grammar; None where it did not end in time."""
    draw = random.Random(seed)
    matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(prefix, add_special_tokens=False)
    assert matcher.consume_tokens(ids)
    named = sorted(set(re.findall(r"\]<\]minimax\[>\[</\w+>", grammar)))
    closers = [tokenizer().encode(text, add_special_tokens=False) for text in (*CLOSERS, *named)]
    while len(ids) < most_tokens and not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()
        if forced:
            matcher.consume_tokens(forced)
            ids += forced
            continue
        closer = draw.choice(closers)
        if draw.random() < 0.5 and matcher.validate_tokens(closer) == len(closer):
            matcher.consume_tokens(closer)
            ids += closer
            continue
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:3072])
        ids.append(int(allowed[0] if 0 in allowed and draw.random() < 0.5 else draw.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    if not matcher.is_stopped():
        return None
    return tokenizer().decode([each for each in ids if each != 0], skip_special_tokens=False)


def read(form: Format, pieces: list[str], is_open: bool = False) -> ReadOutput:
    parser = OutputParser(form, SCHEMAS, begins_in_reasoning=is_open)
    last = len(pieces) - 1
    output = joined(event for place, piece in enumerate(pieces) for event in parser.feed(piece, is_last=place == last))
    for call in output.calls:
        call.id = ""
    return output


def fits(name: str, arguments: Any) -> bool:
    """Return whether arguments are of the tool's schema."""
    if name == "now":
        return bool(arguments == {})
    kinds: dict[str, Any] = {"city": str, "days": int, "unit": str, "on": bool, "deep": dict}
    return (
        {"city", "on"} <= arguments.keys()
        and all(type(value) is kinds[key] for key, value in arguments.items())
        and arguments.get("unit", "°C") in ("°C", 'a"b')
        and all(each in (True, False, None) for each in arguments.get("deep", {"x": []})["x"])
    )


def call_form(form: Format, request: ChatCompletionRequest) -> StructuredOutputsParams:
    return CallGrammar(form, request, tokenizer()).form()


def check(form: Format, text: str, draw: random.Random, *, is_open: bool = False) -> ReadOutput:
    whole = read(form, [text], is_open)
    for call in whole.calls:
        assert fits(call.name, json.loads(call.arguments)), call
    for pieces in (list(text), [text[: (cut := draw.randrange(len(text)))], text[cut:]]):
        assert read(form, pieces, is_open) == whole
    return whole


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_demanded_are_read_back(name: str) -> None:
    form, draw = form_of(name), random.Random(0)
    num_calls = 0
    for seed in range(6):
        wanted = call_form(form, asked(parallel_tool_calls=seed % 2 == 0))
        assert not wanted.triggers
        text = walk(wanted.grammar or "", seed)
        if text is None:
            continue
        assert form.reasoning is not None
        thought = f"{form.reasoning.opens[0].spelled()}hm{form.reasoning.closes[0].spelled()}"
        output = check(form, (thought if seed % 3 == 0 and name != "gpt_oss" else "") + text, draw)
        assert output.text is None, text
        assert len(output.calls) == 1 if seed % 2 else output.calls
        num_calls += len(output.calls)
    assert num_calls >= 3


def test_a_named_tool_is_called_once() -> None:
    form, named = form_of("hermes"), {"type": "function", "function": {"name": "now"}}
    once = call_form(form, asked(tool_choice=named, parallel_tool_calls=False)).grammar
    assert call_form(form, asked(tool_choice=named)).grammar == once
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    assert call_form(form, asked(tool_choice=only, parallel_tool_calls=False)).grammar == once
    assert call_form(form, asked(tool_choice=only)).grammar != once


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_a_model_chooses_follow_strict_schemas_behind_the_trigger(name: str) -> None:
    form = form_of(name)
    wanted = call_form(form, asked(tool_choice="auto", parallel_tool_calls=False))
    assert wanted.stop_after_first is bool(wanted.triggers)
    before = f"So: {wanted.triggers[0]}" if wanted.triggers else ""
    for prefix in ("",) if before else ("Just text.",):
        texts = [text for seed in range(3) if (text := walk(wanted.grammar or "", seed, prefix)) is not None]
        outputs = [check(form, before + text, random.Random(0)) for text in texts]
        assert outputs
        for output in outputs:
            assert (output.text or "").startswith(prefix or "So:")
            assert len(output.calls) == (not prefix)


REGEXES = [r"a/b{1,3}\d?", r"a\/b", "x\ny|z", '[a-z"<]{1,9}']


@pytest.mark.parametrize(
    ("name", "regex"),
    [
        # each format with one of them, and with the others in the long tests
        pytest.param(name, regex, marks=[pytest.mark.long] * (place % len(REGEXES) != number))
        for place, name in enumerate(FORMATS)
        for number, regex in enumerate(REGEXES)
    ],
)
def test_the_input_of_a_custom_tool_matches_its_regular_expression(name: str, regex: str) -> None:
    form, inputs = form_of(name), []
    definition = {"type": "grammar", "grammar": {"syntax": "regex", "definition": regex}}
    tool = {"type": "custom", "custom": {"name": "c", "format": definition}}
    for choice in ("required", "auto"):
        request = asked(tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        wanted = call_form(form, request)
        for seed in range(2):
            text = "".join(wanted.triggers) + (walk(wanted.grammar or "", seed) or "")
            parser = OutputParser(form, {"c": (request.tools or [])[0].function.parameters or {}})
            inputs += [json.loads(call.arguments)["input"] for call in joined(parser.feed(text, is_last=True)).calls]
    assert len(inputs) >= 2  # text is no call where calls have no mark
    assert all(re.fullmatch(regex, each) for each in inputs), inputs


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_strict_tools_follow_patterns_and_lengths(name: str) -> None:
    texts = {
        "whole": {"pattern": r"^[a-z/]{2}(?:\d|x)$"},
        "part": {"pattern": "x|y", "maxLength": 4},
        "begin": {"pattern": r"^a\$"},
        "short": {"minLength": 2, "maxLength": 3},
        "fixed": {"const": "a\nb"},
    }
    properties = {key: {"type": "string", **each} for key, each in texts.items()}
    schema = {"type": "object", "properties": properties, "required": [*texts], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "c", "parameters": schema, "strict": True}}
    form, found = form_of(name), []
    wanted = call_form(form, asked(tools=[tool], tool_choice="required"))
    for seed in range(4):
        parser = OutputParser(form, {"c": schema})
        output = joined(parser.feed(walk(wanted.grammar or "", seed, most_tokens=1000) or "", is_last=True))
        found += [json.loads(call.arguments) for call in output.calls]
    assert found
    for each in found:
        assert all(re.search(text.get("pattern", ""), each[key]) for key, text in texts.items()), each
        assert (len(each["part"]) <= 4, 2 <= len(each["short"]) <= 3, each["fixed"]) == (True, True, "a\nb"), each


@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "pythonic", "glm", "kimi_k3"])
def test_schemas_of_several_types_and_odd_keys_are_written_and_read_back(name: str) -> None:
    properties = {
        "a-b": {"type": ["integer", "null"]},
        "c.d": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "e": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
        "f": {
            "type": "object",
            "properties": {"g:h": {"type": "boolean"}},
            "required": ["g:h"],
            "additionalProperties": False,
        },
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "c", "parameters": schema, "strict": True}}
    wanted = call_form(form_of(name), asked(tools=[tool]))
    found = []
    for seed in range(4):
        text = walk(wanted.grammar or "", seed, most_tokens=600) or ""
        found += joined(OutputParser(form_of(name), {"c": schema}).feed(text, is_last=True)).calls
    assert found
    for arguments in (json.loads(call.arguments) for call in found):
        assert [*arguments] == [*properties]
        assert type(arguments["a-b"]) in (int, type(None))
        assert arguments["c.d"] in (True, False, None)
        assert set(arguments["e"]) <= {1, 2}
        assert type(arguments["f"]["g:h"]) is bool


def test_a_form_holds_behind_the_end_mark_of_the_kind_of_reasoning_that_the_prompt_has_opened() -> None:
    model = ModelFormat(
        {"chat_template": "{{ tools }} <ifm|tool_calls> <ifm|think>"}, tokenizer(), ("auto", "auto"), allows_auto=True
    )
    for prompt, opened, begin, end in (
        ("hi <ifm|think>\n", 0, "", "</ifm|think>"),
        ("hi <ifm|think_fast>", 1, "", "</ifm|think_fast>"),
        ("hi", None, "<ifm|think>", "</ifm|think>"),
    ):
        assert model.opened_by(Prompt(text=prompt)) == opened
        form = model.form(asked(), opened)
        assert form is not None
        assert (form.reasoning_begin, form.reasoning_end) == (begin, end)
    for prompt, opened in (("hi </ifm|think>", None), ("<ifm|think_faster> x", None), ("<ifm|think_faster>", 2)):
        assert model.opened_by(Prompt(text=prompt)) == opened


def test_alternatives_beside_anchors_are_refused_where_texts_stand_between_tags() -> None:
    def form(pattern: str, *, strict: bool) -> StructuredOutputsParams:
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
        tool = {"type": "function", "function": {"name": "c", "parameters": schema, "strict": strict}}
        return call_form(form_of("qwen3_coder"), asked(tools=[tool]))

    with pytest.raises(InvalidRequest, match="anchors beside alternatives"):
        form("^a|b$", strict=True)
    assert form("^a|b$", strict=False) == form("x", strict=False)
    assert form(r"^(a|(b|c))[|]\|$", strict=True) != form("x", strict=False)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_are_not_allowed_are_not_in_the_grammar(name: str) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    wanted = call_form(form_of(name), asked(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
    assert "get-weather" not in (wanted.grammar or "")
    assert "now" in (wanted.grammar or "")
    is_bare = form_of(name).calls.is_bare  # type: ignore[union-attr]
    assert bool(wanted.triggers) is not is_bare


def test_special_tokens_stand_by_their_ids_and_a_named_tool_is_alone() -> None:
    request = asked(tool_choice={"type": "function", "function": {"name": "now"}})
    template = ResponseTemplate(fields={"tool_calls": Field(open="<|im_start|>", close="</x>", content="json")})
    grammar = call_form(template.format("x"), request).grammar or ""
    assert "get-weather" not in grammar
    assert '<[1]> SPACE "{\\"name\\": \\"now\\", \\"arguments\\": "' in grammar


def test_parameters_that_are_no_object_are_refused() -> None:
    request = asked(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}])
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.parameters.type is 'array', must be 'object'"):
        call_form(form_of("hermes"), request)


@pytest.mark.parametrize("required", [5, "c", {"c": 1}])
@pytest.mark.parametrize("name", ["minimax_m2", "minimax_m3", "pythonic"])
def test_required_names_that_are_no_list_are_refused(name: str, required: Any) -> None:
    inner = {"type": "object", "properties": {"c": {}}, "required": required}
    schemas = [inner, {"type": "object", "properties": {"d": inner}}]
    for schema in schemas[: 2 if name == "minimax_m3" else 1]:  # the others leave what is inside to JSON schemas
        tool = {"type": "function", "function": {"name": "c", "parameters": schema}}
        with pytest.raises(InvalidRequest, match="the schema of a tool has required="):
            call_form(form_of(name), asked(tools=[tool], tool_choice="required"))
