from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import FORMS, StructuredOutputsParams
from octavo.errors import InvalidRequest


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_is_kept_as_text_however_it_comes() -> None:
    schema = {"type": "object", "properties": {"ä": {"const": 1}}}
    as_object = SamplingParams(structured_outputs={"json": schema}).structured_outputs
    assert as_object is not None
    assert as_object.form == "json"
    assert as_object.json == '{"type":"object","properties":{"ä":{"const":1}}}'
    assert SamplingParams(structured_outputs={"json": as_object.json}).structured_outputs == as_object


def test_texts_may_come_as_a_list_and_are_texts() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])  # type: ignore[arg-type]
    assert form == StructuredOutputsParams(choice=("a", "b"))
    assert hash(form)
    for wrong in ("ab", 5, ["a", 1]):
        with pytest.raises(InvalidRequest, match=r"structured_outputs.choice is .*, expected a list of texts"):
            StructuredOutputsParams(choice=wrong)  # type: ignore[arg-type]


def test_it_travels_with_the_parameters() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a", "b")))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "is empty; give exactly one of json, json_object"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice; give exactly one"),
        ({"regexp": "a"}, "has the field 'regexp'; known are json"),
        ({"regex": 3}, "Expected `str"),
        ({"choice": ["a", 3]}, "Expected `str"),
        ("json", "expected an object"),
        ({"json": "a" * (1 << 20 | 1)}, "must have at most 1,048,576"),
        ({"regex": "a" * (1 << 16 | 1)}, "must have at most 65,536"),
        ({"grammar": "a" * (1 << 20 | 1)}, "must have at most 1,048,576"),
        ({"choice": ["a"] * 16_385}, "must have at most 16,384"),
        ({"json": {}, "reasoning_begin": "<think>"}, "reasoning_begin is set without reasoning_end"),
        (
            {"triggers": ["<c>"], "reasoning_end": "a", "reasoning_budget": 3},
            "triggers is set without texts and a form",
        ),
        ({"json": {}, "triggers": [""]}, "triggers is set without texts"),
        ({"json": {}, "at_least_one": True}, "at_least_one is set without triggers"),
        ({"reasoning_end": "</think>"}, "is empty"),
        ({"reasoning_end": "a", "reasoning_budget": -1}, "must be at least 0"),
        ({"json": {}, "triggers": ["a" * 129]}, "must have at most 128"),
        ({"json": {}, "triggers": ["a"] * 17}, "must have at most 16"),
        ({"json": {}, "reasoning_end": "a" * 129}, "must have at most 128"),
        ({"json": nested(64)}, "nests arrays and objects more than 64 deep"),
    ],
)
def test_what_is_wrong_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(structured_outputs=value)
    assert (caught.value.field or "").startswith("structured_outputs")


def test_a_deep_schema_within_the_limit_is_accepted() -> None:
    assert StructuredOutputsParams.of({"json": nested(60)}).form == "json"


def test_a_text_that_ends_with_its_form_cannot_ignore_its_end() -> None:
    with pytest.raises(InvalidRequest, match="ends where its form does"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_every_form_has_a_field() -> None:
    assert set(FORMS) < set(StructuredOutputsParams.__struct_fields__)


def test_a_schema_may_be_an_object() -> None:
    schema = {"type": "object", "properties": {"ä": {"type": "integer"}}}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams.of({"json": schema})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"structured_outputs.json is no JSON"):
        StructuredOutputsParams(json={"a": {1, 2}})  # type: ignore[arg-type]
