from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest
from octavo.structured_output.closed_schemas import closed
from octavo.structured_output.grammars import check_grammar, grammar_of


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a vocabulary of the bytes."""
    return LLTokenizer("byte")


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


def admits(text: str, schema: Any, **options: bool) -> bool:
    matcher = LLMatcher(byte_tokenizer(), grammar_of(form(json=schema, **options)))
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_closed"),
    [
        ('{"a": [{"b": null}]}', True),
        ('{"a": [{"b": null, "c": 1}]}', False),
        ('{"z": 1}', False),
        ('{"properties": {"q": null}}', True),
    ],
)
def test_objects_that_list_their_properties_have_no_others(text: str, is_closed: bool) -> None:
    inner = {"properties": {"b": {"type": "null"}}}
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "array", "items": inner}]}, "properties": {"$ref": "#/$defs/o"}},
        "$defs": {"o": {"type": "object", "patternProperties": {"^x$": {}}, "additionalProperties": {"type": "null"}}},
    }
    given = json.dumps(schema)
    assert admits(text, schema) is is_closed
    assert admits(text, schema, disable_additional_properties=False)
    assert json.dumps(schema) == given
    tag = {"structures": [{"begin": "<a>", "schema": inner, "end": "</a>"}], "triggers": ["<a"]}
    grammar = grammar_of(form(structural_tag=tag)).replace('\\"', '"').replace('":false', '": false')
    assert '"additionalProperties": false' in grammar


A, B = ({"type": "object", "properties": {name: {"type": "null"}}, "required": [name]} for name in "ab")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"c": null}'),
        ({"allOf": [A, B]}, '{"a": null, "b": null}'),
        ({"allOf": [{"$ref": "#/$defs/a~1"}, B], "$defs": {"a/": A}}, '{"a": null, "b": null}'),
        ({"$ref": "#/$defs/a", **B, "$defs": {"a": {"anyOf": [A]}}}, '{"a": null, "b": null}'),
        ({**B, "anyOf": [A, {"required": ["c"]}]}, '{"b": null, "a": null}'),
        ({**A, "required": ["c"]}, '{"c": 1}'),
        ({**A, "required": [], "minProperties": 1, "properties": {}}, '{"c": 1}'),
        ({"minProperties": 1, "properties": {"a": False}}, '{"c": 1}'),
        ({"patternProperties": {"^x": {}}, "required": ["c"]}, '{"c": 1}'),
        ({**A, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, '{"a": null, "c": 1}'),
        ({**A, "allOf": [{"required": ["c"]}]}, '{"a": null, "c": 1}'),
        ({**A, "additionalProperties": True}, '{"a": null, "c": 1}'),
        ({"allOf": [{"properties": {"k": A}}, {"properties": {"k": B}}]}, '{"k": {"a": null, "b": null}}'),
        ({"properties": {"k": A}, "patternProperties": {"^k": B}}, '{"k": {"a": null, "b": null}}'),
        ({"allOf": [{"properties": {"k": A}}, {"additionalProperties": B}]}, '{"k": {"a": null, "b": null}}'),
        ({"allOf": [{"items": A}, {"items": B}]}, '[{"a": null, "b": null}]'),
        ({"anyOf": [A], "required": ["c"]}, '{"a": null, "c": 1}'),
        ({"$ref": "#/$defs/a", "required": ["c"], "$defs": {"a": A}}, '{"a": null, "c": 1}'),
        ({"allOf": [{"$ref": "json-schema:///#/$defs/a"}, B], "$defs": {"a": A}}, '{"a": null, "b": null}'),
        ({"allOf": [{"$ref": "#it"}, B], "$defs": {"a": {**A, "$anchor": "it"}}}, '{"a": null, "b": null}'),
    ],
)
def test_an_object_stays_open_where_another_schema_lists_keys_of_it_too(schema: Any, text: str) -> None:
    assert admits(text, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A]},
        {"anyOf": [A, B]},
        {"$ref": "#/$defs/a", "description": "of a", "$defs": {"a": A}},
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "as pydantic writes a reference", "$defs": {"a": A}},
        {
            **A,
            "properties": {**A["properties"], "b": {"type": "null"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        {"anyOf": [A], "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
    ],
)
def test_schemas_of_one_object_each_are_closed(schema: Any) -> None:
    assert not admits('{"a": null, "c": 1}', schema)
    assert not admits('{"a": {"c": 1}}', schema)


def test_a_value_that_one_of_several_schemas_describes_is_closed() -> None:
    schema = {"allOf": [{"properties": {"k": A}}, {"properties": {"l": B}}]}
    assert admits('{"k": {"a": null}, "l": {"b": null}, "m": 1}', schema)
    assert not admits('{"k": {"a": null, "c": 1}}', schema)
    assert not admits('{"l": {"b": null, "c": 1}}', schema)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(
    ("others", "accepted", "refused"),
    [
        (False, '{"a": null}', '{"a": null, "c": 1}'),
        (True, '{"a": null, "c": 1}', '{"a": 1}'),
        ({"type": "integer"}, '{"a": null, "c": 1}', '{"a": null, "c": "x"}'),
    ],
)
def test_unevaluated_properties_are_the_others_of_an_object_of_one_schema(
    others: Any, accepted: str, refused: str, is_closed: bool
) -> None:
    for schema in ({**A, "unevaluatedProperties": others}, {"allOf": [{**A, "unevaluatedProperties": others}]}):
        assert admits(accepted, schema, disable_additional_properties=is_closed)
        assert not admits(refused, schema, disable_additional_properties=is_closed)
    both = {**A, "additionalProperties": {"type": "boolean"}, "unevaluatedProperties": others}
    assert admits('{"a": null, "c": true}', both, disable_additional_properties=is_closed)
    assert not admits('{"a": null, "c": 1}', both, disable_additional_properties=is_closed)


@pytest.mark.parametrize("name", ["anyOf", "allOf"])
def test_unevaluated_properties_beside_other_schemas_are_refused_unless_they_exclude_nothing(name: str) -> None:
    check_grammar(form(json={name: [A], "unevaluatedProperties": True}))
    with pytest.raises(InvalidRequest, match="unevaluatedProperties"):
        check_grammar(form(json={name: [A], "unevaluatedProperties": False}))


def test_a_reference_to_a_number_of_any_length_is_refused() -> None:
    far = {"$ref": "#/allOf/" + 5000 * "9"}
    assert closed({"allOf": [A, far]}) == {"allOf": [A, far]}
    with pytest.raises(InvalidRequest, match="array index"):
        check_grammar(form(json={"allOf": [A, far]}))


def test_the_schema_true_admits_any_json() -> None:
    for text in ("[1, null]", '{"a": {}}', '"a"'):
        assert admits(text, "true")
        assert admits(text, "true", disable_additional_properties=False)


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


def chain_of_rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(count)) + f'\nr{count}: "x"'


def chain_of_schemas(count: int) -> dict[str, Any]:
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": {**links, f"d{count}": {}}, "$ref": "#/$defs/d0"}


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"pattern": f"a{i}.*b{i}"} for i in range(count)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(50_000))}, "100,000 symbols, .* at most 20,000"),
        ({"grammar": "root ::= " + " | ".join('"a"' for _ in range(10_001))}, "symbols"),
        ({"grammar": 'root ::= "a"\n' + "#" * 100_000}, "100,013 characters, must have at most 65,536"),
        ({"grammar": chain_of_rules(5_000)}, "rules and parentheses inside each other, .* at most 1,000"),
        ({"grammar": chain_of_rules(2_000).replace("start", "root").replace(":", " ::=")}, "symbols times rules"),
        ({"grammar": "start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(40))}, "39 operators &"),
        ({"grammar": f"start: %json {json.dumps(chain_of_schemas(2_000))}"}, "schemas inside each other"),
        ({"json": chain_of_schemas(2_000)}, "schemas inside each other, must have at most 1,000"),
        ({"json": {"allOf": patterns(30)}}, "30 patterns and formats for one value, must have at most 8"),
        ({"json": {"allOf": [{"properties": {"a": each}} for each in patterns(30)]}}, "30 patterns and formats"),
        ({"json": {"allOf": [{"items": {"$defs": {}, **each}} for each in patterns(30)]}}, "30 patterns and formats"),
        ({"json": {"$defs": {"a": {"$anchor": "b", "allOf": patterns(30)}}, "$ref": "#b"}}, "30 patterns and formats"),
        ({"json": {"multipleOf": 1_000_003}}, "1,000,003 residues of all multipleOf, must have at most 100,000"),
        (
            {"json": {"allOf": [{"multipleOf": each} for each in (97, 89, 83)]}},
            "716,539 residues of the multipleOf for",
        ),
        ({"json": {"properties": {f"p{i}": {} for i in range(5_000)}}}, "5,000 properties in one object, .* 2,048"),
        ({"json": {"anyOf": [{"properties": {f"p{i}": {}}} for i in range(9_000)]}}, "9,000 properties, .* 8,192"),
        ({"json": {"patternProperties": {f"^a{i}x": {} for i in range(500)}}}, "500 patternProperties in one object"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": ""}] * 2_000, "triggers": ["<"]}},
            "2,000 structures, must have at most 1,024",
        ),
    ],
)
def test_a_grammar_that_would_take_long_is_refused_before_it_is_read(fields: dict[str, Any], message: str) -> None:
    given = form(**fields)
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=f"cannot be used: it has .*{message}.*; make it smaller") as caught:
        grammar_of(given)
    assert time.process_time() - start < 5
    assert (caught.value.field, caught.value.code) == ("structured_outputs", "invalid_grammar")


@pytest.mark.parametrize(
    "large",
    [
        form(choice=[f"word {i}" for i in range(16_000)]),
        form(json={"enum": [f"word {i}" for i in range(16_000)]}),
        form(json={"properties": {f"p{i}": {"type": "string", "pattern": f"^{i}"} for i in range(500)}}),
        form(json={"allOf": [{"properties": {f"p{i}": {"pattern": f"^{i}"}}} for i in range(30)]}),
        form(json={"properties": {f"p{i}": {"multipleOf": 0.25 * i} for i in range(1, 9)}}),
        form(json=chain_of_schemas(300)),
        form(grammar="start: " + " | ".join(f'"w{i}"' for i in range(9_000))),
        form(grammar=chain_of_rules(900)),
        form(grammar="\n" * 50_000 + 'root ::= "a"'),
        form(regex="|".join(f"word{i}" for i in range(5_000))),
    ],
    ids=["choice", "enum", "patterns", "allOf", "multiples", "schemas", "alternatives", "rules", "lines", "regex"],
)
def test_large_grammars_within_the_bounds_are_accepted_soon(large: StructuredOutputsParams) -> None:
    start = time.process_time()
    check_grammar(large)
    assert time.process_time() - start < 10
