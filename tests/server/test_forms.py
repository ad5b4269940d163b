from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.schema.completions import CompletionRequest
from octavo.structured_output.grammars import check_grammar, grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def response_format(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


def asked(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, None),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA, separators=(",", ":"))}, {"json": SCHEMA}),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, {"regex": "a+"}),
        ({"guided_choice": ["a"], "response_format": {"type": "text"}}, {"choice": ["a"]}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
    ],
)
def test_every_name_gives_the_same_form(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    form = asked(**fields).form()
    if "disable_any_whitespace" in str(fields):
        assert form is not None
        assert form.disable_any_whitespace
        return
    assert form == (None if expected is None else StructuredOutputsParams.of(expected))
    assert asked(**fields).given_sampling().get("structured_outputs") == form


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_what_is_no_form_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{field}\b(?!\.regex)") as caught:
        asked(**fields).form()
    assert caught.value.field == field


def test_a_form_that_cannot_be_used_names_the_field_that_asked_for_it() -> None:
    with pytest.raises(InvalidRequest, match="^response_format: json cannot.*uniqueItems") as caught:
        asked(response_format=response_format({"uniqueItems": True}, strict=True)).check_form()
    assert caught.value.field == "response_format"
    asked(guided_regex="[0-9]+").check_form()
    asked().check_form()


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}])
def test_keywords_that_no_grammar_has_are_left_out_of_a_schema_that_is_not_strict(strict: dict[str, Any]) -> None:
    schema = {**SCHEMA, "propertyNames": {"pattern": "a"}, "x-guidance": {"lenient": False}}
    request = asked(response_format=response_format(schema, **strict))
    request.check_form()
    form = request.form()
    assert form is not None
    assert check_grammar(form) == ['Unimplemented keys: ["propertyNames"]']
    matcher = LLMatcher(LLTokenizer("byte"), grammar_of(form))
    # the rest of the schema says that it is an integer
    assert matcher.try_consume_tokens([*b'{"a": "']) == len(b'{"a": ')
    assert matcher.try_consume_tokens([*b"1}"]) == 2


@pytest.mark.parametrize("fields", [{"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}])
def test_schemas_in_the_words_of_vllm_are_always_strict(fields: dict[str, Any]) -> None:
    [name] = fields
    wrong = {**SCHEMA, "propertyNames": {}}
    with pytest.raises(InvalidRequest, match=f"{name}: json cannot be used: .*propertyNames"):
        asked(**{name: wrong if name == "guided_json" else {"json": wrong}}).check_form()


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": "(?=a)b"}, {"$ref": "http://a.b/c"}, {"enum": []}])
def test_a_schema_of_which_no_grammar_can_be_made_is_refused_where_it_is_not_strict(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="^response_format: grammar cannot be used"):
        asked(response_format=response_format(schema)).check_form()


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"a": ["x" * 100_000] * 20}},
        {"response_format": {"a": [[0] * 1000] * 1000}},
        {"guided_choice": ["a"] * 20_000},
        {"guided_grammar": "a" * 100_000},
    ],
)
def test_long_forms_are_refused_when_they_are_read(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        asked(**fields)
