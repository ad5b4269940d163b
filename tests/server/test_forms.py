from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.schema.completions import CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
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
    ],
)
def test_what_is_no_form_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields).form()
    assert caught.value.field == field


def test_a_form_that_cannot_be_used_names_the_field_that_asked_for_it() -> None:
    with pytest.raises(InvalidRequest, match="^response_format: json cannot.*uniqueItems") as caught:
        asked(response_format={"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}).check_form()
    assert caught.value.field == "response_format"
    asked(guided_regex="[0-9]+").check_form()
    asked().check_form()


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
