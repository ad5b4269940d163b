"""`/v2/chat`, as Cohere's API has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.errors import InvalidRequest
from octavo.server.decode import converted
from octavo.server.formats.events import ReasoningDelta, TextDelta, ToolCallBegin, ToolCallDelta, ToolCallEnd
from octavo.server.routes.cohere_chat import _Parts, _reason_of
from octavo.server.schema.cohere_chat import CohereChatRequest
from tests.server.conftest import Served
from tests.server.raw import Answer, ask, events

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def create(server: Served, path: str = "/v2/chat", **fields: Any) -> Answer:
    return ask(server.url, path, {"model": "letters", "messages": MESSAGES, "max_tokens": 6, **fields})


@pytest.mark.parametrize("path", ["/v2/chat", "/cohere/v2/chat"])
def test_a_response_has_what_the_api_promises(server: Served, path: str) -> None:
    body = create(server, path, logprobs=True).json
    num_tokens = len("user: hi\nassistant: ")
    counts = {"input_tokens": num_tokens, "output_tokens": 6}
    logprobs = body.pop("logprobs")
    assert body.pop("id")
    assert body == {
        "finish_reason": "MAX_TOKENS",
        "message": {"role": "assistant", "content": [{"type": "text", "text": "Blocks"}]},
        "usage": {"billed_units": counts, "tokens": counts, "cached_tokens": num_tokens // 2},
    }
    assert "".join(each["text"] for each in logprobs) == "Blocks"
    assert all(len(each["token_ids"]) == len(each["logprobs"]) == 1 for each in logprobs)


def test_a_stream_has_the_events_in_their_order_and_says_that_it_ends(server: Served) -> None:
    answer = create(server, stream=True, max_tokens=3, logprobs=True)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    found = events(answer.body.removesuffix(b"data: [DONE]\n\n"))
    assert [event["type"] for event in found] == [
        *("message-start", "content-start"),
        *["content-delta"] * 3,
        *("content-end", "message-end"),
    ]
    assert found[0]["delta"] == {"message": {"role": "assistant"}}
    assert found[1]["delta"] == {"message": {"content": {"type": "text", "text": ""}}}
    assert "".join(event["delta"]["message"]["content"]["text"] for event in found[2:5]) == "Blo"
    assert sum(len(event["logprobs"]) for event in found[2:5]) == 3
    assert found[-1]["delta"]["finish_reason"] == "MAX_TOKENS"
    assert found[-1]["delta"]["usage"]["tokens"]["output_tokens"] == 3


def test_the_reason_of_the_end_is_that_of_this_api(server: Served) -> None:
    server.llm.sentence = "The end."
    assert create(server, max_tokens=8).json["finish_reason"] == "COMPLETE"
    reasons = [("stop", "end"), ("stop", 7), ("tool_calls", None), ("abort", None)]
    assert [_reason_of(*each) for each in reasons] == ["STOP_SEQUENCE", "COMPLETE", "TOOL_CALL", "ERROR"]


def test_reasoning_text_and_calls_are_parts_of_their_own() -> None:
    parts = _Parts()
    written = [
        *(ReasoningDelta("hm"), TextDelta("a"), TextDelta("b"), ToolCallBegin(0, "c0", "f"), ToolCallDelta(0, "{")),
        *(ToolCallDelta(0, "}"), ToolCallEnd(0), TextDelta("d")),
    ]
    found = msgspec.to_builtins([*(event for each in written for event in parts.add(each)), *parts.end()])
    assert [(event["type"], event["index"]) for event in found] == [
        *(("content-start", 0), ("content-delta", 0), ("content-end", 0)),
        *(("content-start", 1), ("content-delta", 1), ("content-delta", 1), ("content-end", 1)),
        *(("tool-call-start", 0), ("tool-call-delta", 0), ("tool-call-delta", 0), ("tool-call-end", 0)),
        *(("content-start", 2), ("content-delta", 2), ("content-end", 2)),
    ]
    call = found[7]["delta"]["message"]["tool_calls"]
    assert call == {"id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert found[1]["delta"]["message"]["content"] == {"thinking": "hm"}


def test_fields_become_those_of_a_chat() -> None:
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}],
                "tool_plan": "plan",
                "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                "citations": [],
            },
            {
                "role": "tool",
                "tool_call_id": "t",
                "content": [{"type": "document", "document": {"id": "1", "data": {"r": 1}}}],
            },
        ],
        "tools": [TOOL],
        "strict_tools": True,
        "tool_choice": "REQUIRED",
        "documents": ["one", {"id": "two", "data": {"title": "t"}}],
        "citation_options": {"mode": "OFF"},
        "safety_mode": "STRICT",
        "response_format": {"type": "json_object", "schema": {"type": "object"}},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["."],
        "k": 3,
        "p": 0.5,
        "max_tokens": 7,
    }
    request = converted(body, CohereChatRequest)
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert [turn for _, turn in request.turns()] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm\nplan", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": '{"data":{"r":1},"id":"1"}'},
    ]
    chat = request.as_chat()
    assert (chat.tool_choice, [tool.function.strict for tool in chat.tools or []]) == ("required", [True])
    assert chat.documents == [{"id": "doc_0", "data": {"text": "one"}}, {"id": "two", "data": {"title": "t"}}]
    assert chat.chat_template_kwargs == {
        "enable_thinking": False,
        "thinking": False,
        "reasoning": False,
        "citation_options": {"mode": "OFF"},
        "safety_mode": "strict",
    }
    assert {"top_k": 3, "top_p": 0.5, "stop": ["."]}.items() <= chat.given_sampling().items()
    assert (chat.token_limit, chat.form() is None) == (7, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"citation_options": {"mode": "ACCURATE"}}, "citation_options.mode is 'ACCURATE', must be 'OFF'"),
        ({"tool_choice": "f"}, "tool_choice"),
        ({"safety_mode": "x"}, "safety_mode"),
        ({"top_k": 3}, "use k"),
        ({"k": -5}, "k is -5"),
        ({"messages": []}, "messages"),
        ({"max_tokenz": 1}, "did you mean max_tokens"),
        ({"stop_sequences": ["a" * 300]}, "stop_sequences[0] has 300 characters"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name is 'a b'"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_refused_by_the_name_of_this_api(server: Served, fields: Any, words: str) -> None:
    answer = create(server, **fields)
    assert answer.status == 400
    assert words in answer.json["error"]["message"]


def test_errors_about_schemas_name_the_tool_of_this_api() -> None:
    asked = converted({"messages": MESSAGES, "tools": [TOOL]}, CohereChatRequest)
    field = "tools[0].function.parameters"
    with pytest.raises(InvalidRequest, match=r"^tools\[0\].function.parameters.type is 'x'"), asked.named():
        raise InvalidRequest(f"{field}.type is 'x'", field=field)
