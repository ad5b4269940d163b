"""Custom tools and allowed tools over HTTP, in chats and responses, through the openai client."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest

from octavo.server.decode import decode
from octavo.server.schema.chat import ChatCompletionRequest
from tests.server import raw
from tests.server.conftest import Served

PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Apply it."}}
FUNCTION: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXT = '*** Begin "Patch"\n+é\\n'
CALLS = (
    f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": TEXT})}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
)
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def calling(server: Served) -> Served:
    server.llm.sentence = CALLS
    server.llm.max_prompt_len = 4096
    return server


def as_written(text: str) -> str:
    """Return the arguments of an earlier call as prompts have them."""
    return json.dumps({"input": text}, ensure_ascii=False, separators=(",", ":"))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"tools": [PATCH, FUNCTION], "messages": MESSAGES, **fields}
    return client.chat.completions.create(model="letters", **fields)


def test_a_call_of_a_custom_tool_has_its_input_and_comes_back(client: openai.OpenAI, calling: Served) -> None:
    [choice] = ask(client).choices
    custom, function = choice.message.tool_calls
    assert (custom.type, custom.custom.name, custom.custom.input) == ("custom", "patch", TEXT)
    assert (function.type, function.function.name, function.function.arguments) == ("function", "f", '{"x": 1}')
    assert choice.finish_reason == "tool_calls"

    answers = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in (custom, function)]
    ask(client, messages=[*MESSAGES, choice.message.model_dump(exclude_none=True), *answers])
    (_, first, _, _), (_, second, _, _) = calling.llm.requests
    assert '"description":"Apply it."' in first.text
    assert '"parameters":{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]' in first.text
    assert f'{{"name":"patch","arguments":{as_written(TEXT)}}}' in second.text
    assert "<tool_response>\ndone\n</tool_response>" in second.text


def test_a_stream_has_the_input_in_pieces(client: openai.OpenAI) -> None:
    calls: dict[int, list[Any]] = {}
    for chunk in ask(client, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                calls.setdefault(call.index, []).append(call.model_dump(exclude_none=True))
    first, *pieces = calls[0]
    assert (first["type"], first["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert first["id"].startswith("call_")
    assert all(piece.keys() == {"index", "custom"} for piece in pieces)
    assert len(pieces) > 5
    assert "".join(piece["custom"]["input"] for piece in pieces) == TEXT
    assert calls[1][0]["function"] == {"name": "f", "arguments": ""}


def test_responses_have_the_input_in_pieces_and_take_it_back(client: openai.OpenAI, calling: Served) -> None:
    patch: Any = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    function: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    with client.responses.stream(model="letters", input="hi", tools=[patch, function]) as stream:
        events = [*stream]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    whole = client.responses.create(model="letters", input="hi", tools=[patch, function])
    [call, _] = whole.output
    assert call.type == "custom_tool_call"
    assert "".join(deltas) == done.input == call.input == TEXT
    assert len(deltas) > 5
    answer: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    given: Any = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), answer]
    client.responses.create(model="letters", input=given, tools=[patch])
    prompt = calling.llm.requests[-1][1]
    assert as_written(TEXT) in prompt.text
    assert "<tool_response>\ndone\n</tool_response>" in prompt.text


def form_of(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def test_regular_expressions_constrain_inputs_and_rules_are_described(client: openai.OpenAI, calling: Served) -> None:
    for form in (form_of("regex", "a+"), form_of("lark", 'start: "a"+')):
        ask(client, tools=[{"type": "custom", "custom": {"name": "patch", "format": form}}])
    (_, regex, constrained, _), (_, lark, free, _) = calling.llm.requests
    assert '"pattern": "^(?:a+)$"' in constrained.structured_outputs.grammar
    assert free.structured_outputs is None
    assert r"The input follows this grammar (regex):\na+" in regex.text
    assert r"The input follows this grammar (lark):\nstart: \"a\"+" in lark.text


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_leave_the_prompt_as_it_is(client: openai.OpenAI, calling: Served, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    ask(client)
    ask(client, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    (_, all_tools, free, _), (_, some, limited, _) = calling.llm.requests
    assert some.text == all_tools.text
    assert free.structured_outputs is None
    form = limited.structured_outputs
    assert r"\"name\": \"patch\"" in form.grammar
    assert r"\"name\": \"f\"" not in form.grammar
    assert form.triggers == (("<tool_call>",) if mode == "auto" else ())


def test_a_custom_tool_may_be_demanded(client: openai.OpenAI, calling: Served) -> None:
    ask(client, tool_choice={"type": "custom", "custom": {"name": "patch"}})
    [(_, _, params, _)] = calling.llm.requests
    assert r"\"name\": \"patch\"" in params.structured_outputs.grammar
    assert r"\"name\": \"f\"" not in params.structured_outputs.grammar


def test_a_request_is_the_same_behind_a_helper_process() -> None:
    tools = [*custom(format=form_of("regex", "a")), FUNCTION]
    call = {"type": "custom", "id": "c1", "custom": {"name": "c", "input": "a"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    body = {"messages": messages, "tools": tools, "tool_choice": allowed("f")}
    request = decode(json.dumps(body).encode(), ChatCompletionRequest)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ChatCompletionRequest) == request


def allowed(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


def custom(**fields: Any) -> list[Any]:
    return [{"type": "custom", "custom": {"name": "c", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": allowed("f", "g")}, "tool_choice", "names 'g', which is not among the tools: f, patch"),
        ({"tool_choice": allowed()}, "tool_choice", "allows no tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice", "names 'g'"),
        ({"tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice", "of type custom"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "is missing"),
        ({"tools": [{"type": "function", "custom": {"name": "c"}}]}, "tools[0].function", "is missing"),
        ({"tools": [{**PATCH, **FUNCTION, "type": "custom"}]}, "tools[0]", "of type custom and has function"),
        ({"tools": custom(name="a b")}, "tools[0].custom.name", "may have only letters"),
        ({"tools": custom(format={"type": "grammar"})}, "tools[0].custom.format.grammar", "is missing"),
        ({"tools": custom(format=form_of("regex", "(?=a)b"))}, "tools[0].custom.format", "look-around.*; change it"),
        ({"tools": custom(format=form_of("ebnf", "a"))}, "tools[0].custom.format.grammar.syntax", "lark, regex"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0]",
            "of type custom and has function",
        ),
    ],
)
def test_refusal_names_the_field(client: openai.OpenAI, fields: Any, param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param


def test_a_server_may_forbid_that_the_model_chooses_among_allowed_tools(start_server: Any) -> None:
    served = start_server(enable_auto_tool_choice=False)
    body = {"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": allowed("f")}
    answer = raw.ask(served.url, "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
