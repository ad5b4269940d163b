"""The options of requests: their checks, and the keywords that they are given by."""

from __future__ import annotations

import math
from typing import get_type_hints

import msgspec
import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.request_options import BatchKeywords, RequestKeywords, RequestOptions, options_of_each
from octavo.core.sampling_params import SamplingParams
from octavo.engine.text.chat_template import ChatKeywords, ChatOptions
from octavo.errors import InvalidRequest


def test_every_option_can_be_given_as_a_keyword() -> None:
    names = set(RequestOptions.__struct_fields__)
    assert names == set(get_type_hints(RequestKeywords)) == set(get_type_hints(BatchKeywords))
    assert names | set(ChatOptions.__struct_fields__) == set(get_type_hints(ChatKeywords))


def test_a_value_is_for_all_or_one_for_each() -> None:
    first, second = options_of_each(2, {"priority": [1, 2], "tenant": "ab", "cache_salt": None})
    assert (first, second) == (RequestOptions(priority=1, tenant="ab"), RequestOptions(priority=2, tenant="ab"))
    with pytest.raises(InvalidRequest, match="there are 2 prompts, but tenant has 1 entries"):
        options_of_each(2, {"tenant": ["a"]})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("temperature", r"temperature is not an argument of this call: give SamplingParams\(temperature=…\)"),
        ("priorty", "did you mean priority"),
        ("chat_template_content_format", ": templates get text"),
    ],
)
def test_a_name_that_is_no_option_is_told_where_it_belongs(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        RequestOptions.of_keywords({name: 1})
    with pytest.raises(TypeError, match=said):
        options_of_each(1, {name: 1})  # type: ignore[misc]


def test_a_deadline_that_is_no_time_is_refused() -> None:
    for value in (0, math.inf, math.nan, 10**400):
        with pytest.raises(InvalidRequest, match="first_token_deadline_s is"):
            RequestOptions(first_token_deadline_s=value)


def test_a_request_carries_its_options_to_the_core() -> None:
    options = RequestOptions(priority=1, first_token_deadline_s=2.0, tenant="t", cache_salt="s")
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(),
        arrival_time=5.0,
        **msgspec.structs.asdict(options),
    )
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)
    assert RequestOptions(**{name: getattr(there, name) for name in RequestOptions.__struct_fields__}) == options
    assert there.first_token_deadline == 7.0
