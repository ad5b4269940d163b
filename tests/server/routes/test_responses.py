"""`/v1/responses` through the openai client, whose accumulator reads every stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from pydantic import BaseModel

from octavo.core.outputs import RequestError
from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.formats.events import ReasoningDelta, TextDelta, ToolCallBegin, ToolCallDelta, ToolCallEnd
from octavo.server.routes.responses import _Output
from octavo.server.schema.chat import TextPart
from octavo.server.schema.responses import FunctionTool, ResponsesRequest
from tests.server.conftest import Served
from tests.server.raw import ask, events

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}


def allowed(*tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "required", "tools": [*tools]}


def test_response_has_what_the_openai_api_promises(client: openai.OpenAI, server: Served) -> None:
    response = client.responses.create(model="letters", input="hi", instructions="be short", max_output_tokens=6)
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.instructions) == ("incomplete", "Blocks", "be short")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    num_tokens = len("system: be short\nuser: hi\nassistant: ")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (num_tokens, 6)
    assert response.usage.input_tokens_details.cached_tokens == num_tokens // 2
    assert server.llm.requests[0][1].text == "system: be short\nuser: hi\nassistant: "


def test_fields_without_effect_come_back_with_the_response(server: Served) -> None:
    fields = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"}
    fields |= {"metadata": {"a": "b"}, "prompt_cache_options": {"mode": "implicit"}}
    response = ask(server.url, "/v1/responses", {"input": "hi", **fields}).json
    assert {name: response[name] for name in fields} == fields


def test_tokens_of_an_input_are_counted(client: openai.OpenAI, server: Served) -> None:
    counted = client.responses.input_tokens.count(model="letters", input="hi", instructions="be short")
    num_tokens = len("system: be short\nuser: hi\nassistant: ")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", num_tokens)
    assert (
        client.responses.create(model="letters", input="hi", instructions="be short").usage.input_tokens == num_tokens
    )
    answer = ask(server.url, "/v1/responses/input_tokens", {"input": "hi", "max_output_tokens": 5, "temperature": 0.5})
    assert answer.json == {"object": "response.input_tokens", "input_tokens": len("user: hi\nassistant: ")}
    assert ask(server.url, "/v1/responses/input_tokens", {"input": "hi", "model": "x"}).status == 404
    assert ask(server.url, "/v1/responses/input_tokens", {"input": "hi", "tool": 1}).error["param"] == "tool"


def test_a_stream_has_events_in_order_and_ends_with_the_whole_response(client: openai.OpenAI, server: Served) -> None:
    server.llm.sentence = "The end."
    with client.responses.stream(model="letters", input="hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    deltas = ["response.output_text.delta"] * len("The end.")
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *deltas,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    whole = client.responses.create(model="letters", input="hi")
    assert final.output_text == whole.output_text == "The end."
    assert (final.usage, final.status) == (whole.usage, whole.status) == (whole.usage, "completed")


def test_events_are_numbered_and_name_the_items_of_the_whole_response(server: Served) -> None:
    answer = ask(server.url, "/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 2})
    found = events(answer.body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    [item] = found[-1]["response"]["output"]
    assert {event["item_id"] for event in found if "item_id" in event} == {item["id"]}
    assert {event["output_index"] for event in found if "output_index" in event} == {0}
    assert found[-1]["type"] == "response.incomplete"
    assert b"event: response.created\ndata: {" in answer.body
    assert b"[DONE]" not in answer.body


def test_items_become_the_turns_of_a_conversation() -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "u"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "t", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    request = ResponsesRequest(input=given, instructions="i")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
    ]
    assert request.turns() == [
        ("instructions", {"role": "system", "content": "i"}),
        ("input[0]", {"role": "developer", "content": "d"}),
        ("input[1]", {"role": "user", "content": "u"}),
        ("input[2]", {"role": "assistant", "reasoning_content": "r", "content": "t", "tool_calls": calls}),
        ("input[7]", {"role": "tool", "tool_call_id": "c1", "content": "one"}),
        ("input[8]", {"role": "tool", "tool_call_id": "c2", "content": "two"}),
    ]
    assert [message.role for message in request.as_chat().messages][3:] == ["assistant", "tool", "tool"]


def test_images_and_sounds_are_parts_of_the_conversation() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    text = {"type": "input_text", "text": "what?"}
    given = [{"role": "user", "content": [sound, image, text]}]
    [message] = msgspec.convert({"input": given}, ResponsesRequest).as_chat().messages
    assert isinstance(message.content, list)
    assert [part.as_dict() for part in message.content if not isinstance(part, TextPart)] == [
        sound,
        {"type": "image_url", "image_url": {"url": image["image_url"]}},
    ]
    assert message.content[2].text == "what?"
    given = [{"type": "reasoning", "id": "rs_1", "summary": [], "content": [sound]}]
    with pytest.raises(InvalidRequest, match="is of type input_audio, which is not read here"):
        msgspec.convert({"input": given}, ResponsesRequest).as_chat()


def test_tools_of_the_client_are_passed_on_and_those_of_the_server_are_skipped() -> None:
    request = ResponsesRequest(
        input="a",
        tools=[
            TOOL,
            {"type": "web_search"},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
            {"type": "namespace", "name": "mcp__disk__", "description": "", "tools": [{**TOOL, "name": "read"}]},
        ],
    )
    names = ["f", "patch", "mcp__disk__read"]
    assert [tool.function.name for tool in request.as_chat().tools or []] == [*request.named_tools()] == names


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_sees_all_tools_and_calls_those_that_are_allowed(mode: str) -> None:
    space = {"type": "namespace", "name": "disk", "tools": [{**TOOL, "name": "read"}]}
    allowed = [
        {"type": "web_search"},
        {"type": "custom", "name": "patch"},
        {**TOOL, "namespace": "disk", "name": "read"},
    ]
    request = ResponsesRequest(
        input="a",
        tools=[TOOL, {"type": "web_search"}, {"type": "custom", "name": "patch"}, space],
        tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed},
    )
    chat = request.as_chat()
    assert [tool.function.name for tool in chat.tools or []] == ["f", "patch", "disk__read"]
    assert [tool.function.name for tool in chat.callable_tools] == ["patch", "disk__read"]
    assert (chat.call_mode, chat.must_call, chat.constrains_calls) == (mode, mode == "required", True)


def test_where_only_tools_of_the_server_are_allowed_none_is_called() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    request = ResponsesRequest(input="a", tools=[TOOL, {"type": "web_search"}], tool_choice=choice)
    assert request.as_chat().call_mode == "none"
    request.tools = [{"type": "web_search"}]
    assert request.as_chat().tools is None


def test_fields_become_those_of_a_chat() -> None:
    request = ResponsesRequest(
        input="a",
        text=None,
        top_logprobs=3,
        max_output_tokens=5,
        seed=7,  # type: ignore[call-arg]
        tools=[TOOL],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
    )
    chat = request.as_chat()
    assert (chat.logprobs, chat.top_logprobs, chat.max_completion_tokens) == (True, 3, 5)
    assert chat.given_sampling()["seed"] == 7
    assert chat.parallel_tool_calls is False


def test_reasoning_calls_and_text_are_items_of_their_own() -> None:
    tools: Any = {"patch": ("ns", FunctionTool(type="custom", name="apply"))}
    output = _Output("1", tools)
    written = [
        ReasoningDelta("hm"),
        TextDelta("a"),
        TextDelta("b"),
        ToolCallBegin(0, "call_0", "f"),
        ToolCallDelta(0, '{"x"'),
        ToolCallDelta(0, ":1}"),
        ToolCallEnd(0),
        ToolCallBegin(1, "call_1", "patch"),
        ToolCallDelta(1, "*"),
    ]
    found = [event for each in written for event in output.add(each)] + list(output.end())
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
    ]
    assert [(item.type, item.id) for item in output.items] == [
        ("reasoning", "rs_1_0"),
        ("message", "msg_1_1"),
        ("function_call", "fc_1_2"),
        ("custom_tool_call", "ctc_1_3"),
    ]
    assert (output.items[2].arguments, output.items[2].call_id) == ('{"x":1}', "call_0")
    assert (output.items[3].input, output.items[3].name, output.items[3].namespace) == ("*", "apply", "ns")


def test_parsed_output_follows_its_schema(client: openai.OpenAI, server: Served) -> None:
    class Point(BaseModel):
        x: int

    with pytest.raises(ValueError, match="Blocks"):  # the fake model follows no schema
        client.responses.parse(model="letters", input="hi", text_format=Point)
    form = server.llm.requests[0][2].structured_outputs
    assert form is not None
    assert json.loads(str(form.json))["properties"] == {"x": {"title": "X", "type": "integer"}}


def test_log_probabilities_come_where_they_are_asked_for(client: openai.OpenAI, server: Served) -> None:
    response = client.responses.create(
        model="letters", input="hi", max_output_tokens=2, include=["message.output_text.logprobs"], top_logprobs=2
    )
    [part] = response.output[0].content  # type: ignore[union-attr]
    assert [each.token for each in part.logprobs or []] == ["B", "l"]  # type: ignore[union-attr]


def test_a_stream_has_the_log_probabilities_of_tokens_without_text(server: Served) -> None:
    server.llm.sentence = "\0a\0b\0"  # the token 0 has none, as an end or a part of a character
    asked = {"input": "hi", "max_output_tokens": 5, "include": ["message.output_text.logprobs"]}
    [item] = ask(server.url, "/v1/responses", asked).json["output"]
    said = events(ask(server.url, "/v1/responses", {**asked, "stream": True}).body)
    deltas = [each for each in said if each["type"] == "response.output_text.delta"]
    assert [each["token"] for each in item["content"][0]["logprobs"]] == ["<s>", "a", "<s>", "b", "<s>"]
    assert [entry for each in deltas for entry in each["logprobs"]] == item["content"][0]["logprobs"]
    assert said[-1]["response"]["output"][0]["content"] == item["content"]


def test_an_error_on_the_way_ends_the_stream_with_a_failed_response(client: openai.OpenAI, server: Served) -> None:
    server.llm.error, server.llm.error_after = RequestError("it broke", code="internal_error"), 2
    with client.responses.stream(model="letters", input="hi") as stream:
        last = [*stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.status, last.response.error.message) == ("failed", "it broke")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "all"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"verbosity": "x" * 17}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": allowed({"type": "function", "name": "g"}), "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": allowed({"type": "function"}), "tools": [TOOL]}, "tool_choice.tools[0].name"),
        ({"tool_choice": allowed(), "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "function", "nam": "f"}]}, "tools[0].nam"),
        ({"tools": [{"type": "web_search"}, {**TOOL, "name": "a b"}]}, "tools[1].name"),
        (
            {"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [{**TOOL, "name": "f" * 130}]}]},
            "tools[1].tools[0].name",
        ),
        (
            {"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
            "tools[1].tools[0].name",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "contnt": "a"}]}, "input[1].contnt"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "x" * 300, "name": "f"}]}, "input[0].tool_calls[0].id"),
        ({"input": [{"role": "user", "content": "a"}] * 9000}, "input"),
        ({"instructions": "x" * (3 << 20)}, "instructions"),
        ({"include": ["x" * 300]}, "include[0]"),
    ],
)
def test_errors_name_the_field_of_this_api(server: Served, fields: Any, param: str) -> None:
    answer = ask(server.url, "/v1/responses", {"input": "a", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_messages_of_errors_name_the_field_of_this_api(server: Served) -> None:
    answer = ask(server.url, "/v1/responses", {"input": "a", "max_output_tokens": 0})
    assert answer.error["message"] == "max_output_tokens is 0, must be at least 1"


def test_nothing_is_stored(client: openai.OpenAI, server: Served) -> None:
    assert client.responses.create(model="letters", input="hi", store=True).model_extra["store"] is False  # type: ignore[index]
    for look_up in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            look_up("resp_1")


def test_verbosity_reaches_the_template() -> None:
    asked = decode(b'{"input": "a", "text": {"verbosity": "low"}, "truncation": "auto"}', ResponsesRequest)
    assert asked.as_chat().template_values({}) == {"verbosity": "low"}
