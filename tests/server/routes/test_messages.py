"""`/v1/messages`, as Anthropic's API has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.core.outputs import RequestError
from octavo.errors import InvalidRequest
from octavo.server.decode import converted
from octavo.server.errors import ApiError
from octavo.server.formats.events import ReasoningDelta, TextDelta, ToolCallBegin, ToolCallDelta, ToolCallEnd
from octavo.server.routes.messages import _Blocks
from octavo.server.schema.messages import CountTokensRequest, MessagesRequest
from tests.server.conftest import Served
from tests.server.raw import Answer, ask, events

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def create(server: Served, **fields: Any) -> Answer:
    return ask(server.url, "/v1/messages", {"messages": MESSAGES, "max_tokens": 6, **fields})


def test_message_has_what_the_api_promises(server: Served) -> None:
    message = create(server, model="letters", system="be short").json
    num_tokens = len("system: be short\nuser: hi\nassistant: ")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "letters",
        "content": [{"type": "text", "text": "Blocks"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_tokens - num_tokens // 2,
            "cache_read_input_tokens": num_tokens // 2,
            "cache_creation_input_tokens": 0,
            "output_tokens": 6,
        },
    }


def test_a_stream_has_the_events_in_their_order(server: Served) -> None:
    answer = create(server, stream=True, max_tokens=3)
    found = events(answer.body)
    assert [event["type"] for event in found] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 3
    assert answer.body.startswith(b"event: message_start\ndata: {")


def test_a_budget_of_reasoning_is_accepted_where_the_model_marks_none(server: Served) -> None:
    assert create(server, thinking={"type": "enabled", "budget_tokens": 1024}).status == 200


def test_reasoning_calls_and_text_are_blocks_of_their_own() -> None:
    blocks = _Blocks("sig")
    written = [
        ReasoningDelta("hm"),
        TextDelta("a"),
        ToolCallBegin(0, "call_0", "f"),
        ToolCallDelta(0, '{"x"'),
        ToolCallDelta(0, ":1}"),
        ToolCallEnd(0),
        TextDelta("b"),
    ]
    found = [event for each in written for event in blocks.add(each)] + list(blocks.end())
    deltas = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert deltas == [
        *("thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta", "text_delta")
    ]
    assert [event["index"] for event in found if event["type"] == "content_block_start"] == [0, 1, 2, 3]
    assert [(block.type, block.text, block.thinking, block.input) for block in blocks.blocks if block.type] == [
        ("thinking", blocks.blocks[0].text, "hm", blocks.blocks[0].input),
        ("text", "a", blocks.blocks[1].thinking, blocks.blocks[1].input),
        ("tool_use", blocks.blocks[2].text, blocks.blocks[2].thinking, {"x": 1}),
        ("text", "b", blocks.blocks[3].thinking, blocks.blocks[3].input),
    ]


def test_blocks_become_the_turns_of_a_conversation() -> None:
    body = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "c"},
                ],
            },
            {"role": "assistant", "content": "go"},
        ],
        "thinking": {"type": "disabled"},
        "stop_sequences": ["."],
        "metadata": {"user_id": "u"},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "top_k": 3,
    }
    request = converted(body, CountTokensRequest)
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert [turn for _, turn in request.turns()] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "r"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "go"},
    ]
    chat = request.as_chat()
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.user) == ("required", False, "u")
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert chat.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert chat.given_sampling()["stop"] == ["."]


def test_tokens_are_counted_without_max_tokens(server: Served) -> None:
    answer = ask(server.url, "/v1/messages/count_tokens", {"messages": MESSAGES, "model": "letters"})
    assert answer.json == {"input_tokens": len("user: hi\nassistant: ")}


def test_the_turn_ends_where_the_model_ends_it(server: Served) -> None:
    server.llm.sentence = "The end."
    message = create(server, max_tokens=8).json
    assert (message["content"][0]["text"], message["stop_reason"]) == ("The end.", "end_turn")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0] is of type docum",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source has no data",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source is a file, and no files are stored",
        ),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokenz": 1}, "did you mean max_tokens"),
        ({"n": 2}, "n is not supported"),
        ({"stop": "a"}, "use stop_sequences"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is not supported: octavo has no such extensions"),
        (
            {"messages": [{"role": "user", "content": "a", "thinking_blocks": [{"type": "thinking"}]}]},
            "messages[0].thinking_blocks is not supported: send the blocks as parts of content",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] is of type 'bash_20250124'"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [{"name": "f"}]}, "tool_choice names 'g'"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"propertyNames": {}}}}},
            'output_config.format: json cannot be used: Unimplemented keys: ["propertyNames"]',
        ),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65 entries"),
        ({"thinking": {"type": "enabled", "budget_tokens": -3}}, "thinking.budget_tokens is -3, must be at least 0"),
        ({"stop_sequences": ["a" * 300]}, "stop_sequences[0] has 300 characters"),
        ({"system": "s", "messages": [{"role": "user", "content": "x" * (3 << 20)}]}, "messages[0].content has"),
    ],
)
def test_errors_have_the_form_of_this_api(server: Served, fields: Any, words: str) -> None:
    answer = create(server, **fields)
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert words in answer.json["error"]["message"]


@pytest.mark.parametrize(("param", "begin"), [("messages", "prompt is too long: "), ("max_tokens", "")])
def test_clients_learn_that_a_prompt_is_too_long(param: str, begin: str) -> None:
    error = ApiError(400, "so many", param=param, code="context_length_exceeded")
    assert error.messages_body.error.message == f"{begin}so many"


def test_clients_learn_that_threads_are_not_kept(server: Served) -> None:
    details = create(server, thread={"type": "create"}).json["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_errors_of_every_status_have_a_kind_of_this_api(server: Served) -> None:
    assert create(server, model="nope").json["error"]["type"] == "not_found_error"
    server.llm.error, server.llm.error_after = RequestError("full", code="queue_full"), 0
    assert create(server).json["error"] == {"type": "rate_limit_error", "message": "full"}
    server.llm.error_after = 2
    last = create(server, stream=True).body.split(b"\n\n")[-2]
    assert last == b'event: error\ndata: {"error":{"type":"rate_limit_error","message":"full"},"type":"error"}'


def test_errors_about_tools_name_the_field_of_this_api(server: Served) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [tool, {**tool, "name": "a b"}]}
    error = ask(server.url, "/v1/messages", body).json["error"]
    assert error["message"].startswith("tools[1].name is 'a b'")
    asked = msgspec.convert(body, MessagesRequest)
    field = "tools[1].function.parameters"
    with pytest.raises(InvalidRequest, match=r"^tools\[1\].input_schema.type is 'x'") as caught, asked.named():
        raise InvalidRequest(f"{field}.type is 'x'", field=field)
    assert caught.value.field == "tools[1].input_schema"
