from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.structured_output.grammars import check_grammar


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams.of(fields)


@pytest.mark.parametrize(
    "good",
    [
        form(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}}),
        form(json={"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
        form(json={"minProperties": 2, "required": ["a"], "properties": {"a": {}}}),
        form(json_object=True),
        form(regex=r"\d{3}-[a-z]+"),
        form(choice=["yes", 'no "thanks"', "\\", "ü"]),
        form(grammar='start: "a" B\nB: /[0-9]+/'),
        form(grammar='root ::= "x" [0-9]+ "y"'),
        form(
            structural_tag={
                "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f="],
            }
        ),
    ],
)
def test_grammars_of_every_form_are_accepted(good: StructuredOutputsParams) -> None:
    check_grammar(good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (form(json={"type": "array", "uniqueItems": True, "not": {}}), 'json cannot be used.*"not", "uniqueItems"'),
        (form(json={"x-guidance": {"lenient": True}, "not": {}}), '"not"'),
        (form(json={"$ref": "https://example.org/schema.json"}), "json cannot be used"),
        (form(json={"items": [{"minProperties": 3, "required": ["a"]}]}), "minProperties of 3 needs"),
        (form(json="{"), "json cannot be used"),
        (form(regex=r"a(?=b)"), "regex cannot be used.*look-around"),
        (form(regex="("), "regex cannot be used"),
        (form(grammar="start: missing"), "grammar cannot be used"),
        (form(grammar="root ::= ("), "grammar cannot be used"),
        (form(structural_tag={"format": {}}), "structural_tag cannot be used: expected"),
        (form(structural_tag={"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}), "no tr"),
        (form(structural_tag={"structures": [{"begin": "<a>"}], "triggers": ["<a"]}), "structural_tag cannot be used"),
        (form(structural_tag="3"), "structural_tag cannot be used"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(bad: StructuredOutputsParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_grammar(bad)
    assert (caught.value.field, caught.value.code) == ("structured_outputs", "invalid_grammar")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "hostile",
    [
        form(regex="(" * 5_000 + "a" + ")" * 5_000),
        form(regex="(((a{1,999}){1,999}){1,999}){1,999}"),
        form(json=json.dumps({"allOf": [{"pattern": f"a{{{i}}}"} for i in range(2_000)]})),
        form(json='{"items":' * 5_000 + "{}" + "}" * 5_000),
        form(grammar="root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000),
        form(grammar="start: " + " | ".join(f'"{i}"' for i in range(7_000))),
        form(structural_tag="[" * 100_000),
    ],
    ids=["nested groups", "repeats", "allOf", "nested items", "nested rules", "many choices", "nested tags"],
)
def test_hostile_grammars_end_soon(hostile: StructuredOutputsParams) -> None:
    began = time.process_time()
    with suppress(InvalidRequest):
        check_grammar(hostile)
    # not a measurement: without limits one of these takes minutes
    assert time.process_time() - began < 20
