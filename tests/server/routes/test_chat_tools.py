"""Tools and reasoning over HTTP: the whole response is the joined stream; what cannot be done is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server.app import loading_app
from octavo.structured_output.grammars import check_grammar
from tests.server import raw
from tests.server.conftest import Served

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
    {"type": "function", "function": {"name": "g"}},
]
TEXT = (
    "<think>\nLet me see.\n</think>\n\nI call it.\n"
    '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "“é”"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g"}\n</tool_call>'
)
CALL = [{"function": {"name": "f"}}]
BATCH = "/v1/chat/completions/batch"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    """A server of a model that reasons and calls tools."""
    served = Served(ServerArgs(port=0, reasoning_parser="deepseek_r1"))
    yield served
    served.stop()


@pytest.fixture
def client(thinking: Served) -> Iterator[openai.OpenAI]:
    thinking.llm.reset()
    thinking.llm.sentence = TEXT
    thinking.llm.max_prompt_len = 4096
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"tools": TOOLS, "messages": MESSAGES, **fields}
    return client.chat.completions.create(model="letters", **fields)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str, Any]:
    """Return the joined deltas, the reason of the end and the usage of a stream."""
    text, reasoning, calls, reason, usage = "", "", {}, "", None
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name or call.function.name, arguments + call.function.arguments)
    return {"text": text, "reasoning": reasoning, "calls": list(calls.values())}, reason, usage


def whole(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str, Any]:
    answer = ask(client, **fields)
    [choice] = answer.choices
    message = choice.message
    assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    found = {"text": message.content or "", "reasoning": getattr(message, "reasoning", None) or "", "calls": calls}
    return found, choice.finish_reason, answer.usage


def test_the_whole_response_is_the_joined_stream(client: openai.OpenAI) -> None:
    found = whole(client)
    assert found[:2] == (
        {"text": "I call it.", "reasoning": "Let me see.", "calls": [("f", '{"x": 1, "y": "“é”"}'), ("g", "{}")]},
        "tool_calls",
    )
    assert found[2].completion_tokens_details.reasoning_tokens == TEXT.index("</think>") + len("</think>")
    assert streamed(client) == found


def test_a_call_within_which_the_text_stops_is_not_a_reason_to_call(client: openai.OpenAI, thinking: Served) -> None:
    thinking.llm.sentence = TEXT[: TEXT.index("“é”")]
    assert whole(client)[:2] == (
        {"text": "I call it.", "reasoning": "Let me see.", "calls": [("f", '{"x": 1, "y": "')]},
        "stop",
    )
    assert streamed(client)[1] == "stop"
    tool: Any = {"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}}
    response = client.responses.create(model="letters", input="hi", tools=[tool])
    assert response.output[-1].status == "incomplete"


def test_the_request_says_whether_reasoning_is_read_and_shown(client: openai.OpenAI) -> None:
    assert whole(client, extra_body={"include_reasoning": False})[0]["reasoning"] == ""
    assert whole(client, tools=openai.NOT_GIVEN, extra_body={"separate_reasoning": False})[0]["text"] == TEXT
    read = whole(client, tool_choice="none")
    assert read[0]["text"] == TEXT[TEXT.index("I call") :]
    assert read[1] == "stop"
    once = [
        chunk.choices[0].delta.reasoning
        for chunk in ask(client, stream=True, extra_body={"stream_reasoning": False})
        if getattr(chunk.choices[0].delta, "reasoning", None)
    ]
    assert once == ["Let me see."]


def test_reasoning_is_parted_from_the_answer_to_each_conversation(client: openai.OpenAI, thinking: Served) -> None:
    user = {"role": "user", "content": "hi"}
    begun = [user, {"role": "assistant", "content": "<think>"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    thinking.llm.sentence = "so</think>yes"
    found = raw.ask(thinking.url, BATCH, {"messages": [begun, begun], **fields}).json
    read = [each["message"] for each in found["choices"]]
    assert [(each["reasoning"], each["content"]) for each in read] == [("so", "yes")] * 2
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len("so</think>")
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    asked = {"messages": [begun, [user]], "response_format": form, **fields}
    assert "end within reasoning" in raw.ask(thinking.url, BATCH, asked).error["message"]


def test_a_prompt_that_opens_reasoning_is_gone_on_with(client: openai.OpenAI, thinking: Served) -> None:
    thinking.llm.sentence = "so</think>yes"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    read = whole(client, tools=openai.NOT_GIVEN, messages=messages, extra_body=body)
    assert read[0] == {"text": "yes", "reasoning": "so", "calls": []}


def test_log_probabilities_of_reasoning_are_in_no_text_of_a_response(thinking: Served) -> None:
    thinking.llm.reset()
    thinking.llm.sentence = "<think>so</think>yes"
    asked = {"input": "hi", "max_output_tokens": 20, "include": ["message.output_text.logprobs"]}
    _, item = raw.ask(thinking.url, "/v1/responses", asked).json["output"]
    said = raw.events(raw.ask(thinking.url, "/v1/responses", {**asked, "stream": True}).body)
    deltas = [entry for each in said for entry in each.get("logprobs", []) if each["type"].endswith("text.delta")]
    assert "".join(entry["token"] for entry in item["content"][0]["logprobs"]) == "yes"
    assert deltas == item["content"][0]["logprobs"]


def test_a_call_that_is_demanded_has_a_grammar(client: openai.OpenAI, thinking: Served) -> None:
    ask(client, tool_choice={"type": "function", "function": {"name": "g"}}, parallel_tool_calls=False)
    ask(client)
    demanded, free = (params.structured_outputs for _, _, params, _ in thinking.llm.requests)
    assert free is None
    assert demanded is not None
    assert '\\"name\\": \\"g\\"' in demanded.grammar
    assert '\\"name\\": \\"f\\"' not in demanded.grammar


def test_a_call_that_is_demanded_leaves_no_text_for_another_form(client: openai.OpenAI, thinking: Served) -> None:
    ask(client, tool_choice="required", response_format={"type": "json_object"})
    [form] = [params.structured_outputs for _, _, params, _ in thinking.llm.requests]
    assert form is not None
    assert form.form == "grammar"


def test_keywords_without_a_grammar_are_left_out_of_tools_not_strict(client: openai.OpenAI, thinking: Served) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "propertyNames": {"pattern": "a"},
        "required": ["a"],
    }
    function = {"name": "f", "parameters": parameters}
    ask(client, tool_choice="required", tools=[{"type": "function", "function": function}])
    [form] = [params.structured_outputs for _, _, params, _ in thinking.llm.requests]
    assert form is not None
    assert check_grammar(form) == ['Unimplemented keys: ["propertyNames"]']
    with pytest.raises(openai.BadRequestError, match="propertyNames"):
        ask(client, tools=[{"type": "function", "function": {**function, "strict": True}}])


def test_what_a_function_returns_reaches_the_template(client: openai.OpenAI, thinking: Served) -> None:
    ask(client, tools=[{"type": "function", "function": {"name": "f", "return": {"type": "string"}}}])
    [(_, prompt, _, _)] = thinking.llm.requests
    assert '"return":{"type":"string"}' in prompt.text


def test_forms_hold_behind_reasoning_whose_length_may_be_limited(client: openai.OpenAI, thinking: Served) -> None:
    ask(client, tool_choice="required", extra_body={"thinking_token_budget": 5})
    ask(client, tools=openai.NOT_GIVEN, extra_body={"guided_regex": "a"})
    ask(client, extra_body={"thinking_token_budget": 0})
    ask(client, extra_body={"thinking_token_budget": -1}, tools=openai.NOT_GIVEN)
    found = [params.structured_outputs for _, _, params, _ in thinking.llm.requests]
    assert [(form.form, form.reasoning_begin, form.reasoning_end, form.reasoning_budget) for form in found if form] == [
        ("grammar", "<think>", "</think>", 5),
        ("regex", "<think>", "</think>", None),
        (None, "<think>", "</think>", 0),
    ]


def test_a_streamed_response_with_a_demanded_call_ends_with_the_whole(client: openai.OpenAI, thinking: Served) -> None:
    tool: Any = {"type": "function", "strict": False, **TOOLS[0]["function"]}
    other: Any = {"type": "function", "strict": False, "name": "g", "parameters": {"type": "object"}}
    fields: Any = {"model": "letters", "input": "hi", "tools": [tool, other], "tool_choice": "required"}
    with client.responses.stream(**fields) as stream:
        joined = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        streamed = stream.get_final_response()
    response = client.responses.create(**fields)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    texts: Any = [
        [
            (getattr(item, "name", None), getattr(item, "arguments", None), [part.text for part in item.content or []])
            if item.type != "function_call"
            else (item.name, item.arguments)
            for item in found.output
        ]
        for found in (streamed, response)
    ]
    assert [item.type for item in streamed.output] == [item.type for item in response.output] == kinds
    assert (texts[0], texts[1][2:]) == (texts[1], [("f", '{"x": 1, "y": "“é”"}'), ("g", "{}")])
    assert joined == "".join(arguments for _, arguments in texts[1][2:])
    assert all(params.structured_outputs for _, _, params, _ in thinking.llm.requests)


def test_a_streamed_message_with_a_demanded_call_is_the_whole_one(client: openai.OpenAI, thinking: Served) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("f", "g")]
    fields = {"messages": MESSAGES, "max_tokens": len(TEXT), "tools": tools, "tool_choice": {"type": "any"}}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 7}
    message = raw.ask(thinking.url, "/v1/messages", fields).json
    events = raw.events(raw.ask(thinking.url, "/v1/messages", {**fields, "stream": True}).body)
    joined: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            joined.append("")
        elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            [joined[-1]] = [joined[-1] + text for key, text in event["delta"].items() if key != "type"]
    thought, text, *calls = message["content"]
    assert (thought["thinking"], text["text"]) == ("Let me see.", "I call it.")
    assert [(call["name"], call["input"]) for call in calls] == [("f", {"x": 1, "y": "“é”"}), ("g", {})]
    assert joined[:2] == ["Let me see.", "I call it."]
    assert [json.loads(text) for text in joined[2:]] == [call["input"] for call in calls]
    assert message["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    found = [params.structured_outputs for _, _, params, _ in thinking.llm.requests]
    assert [form.reasoning_budget for form in found if form] == [7, 7]


def test_tools_stand_in_the_system_message_of_templates_without_any(client: openai.OpenAI, thinking: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    ask(client, messages=history)
    [(_, prompt, _, _)] = thinking.llm.requests
    assert prompt.text.startswith("system: You may call")
    assert '"name":"g"' in prompt.text
    assert (
        'user: hi\nassistant: <tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>\n'
        "user: <tool_response>\n5\n</tool_response>\nassistant: " in prompt.text
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {
                "tool_choice": "required",
                "tools": [
                    *TOOLS,
                    {
                        "function": {
                            "name": "h",
                            "strict": True,
                            "parameters": {"properties": {"a": {"uniqueItems": True, "type": "array"}}},
                        }
                    },
                ],
            },
            "tools[2].function.parameters",
            "invalid_grammar",
        ),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "h"}},
                "tools": [*TOOLS, {"function": {"name": "h", "parameters": {"type": "array"}}}],
            },
            "tools[2].function.parameters",
            "invalid_value",
        ),
        (
            {"tools": [{"function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": CALL * 300}]}, "messages[0].tool_calls", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ],
)
def test_refusal_names_the_field(client: openai.OpenAI, fields: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_server_may_forbid_that_the_model_chooses_calls(start_server: Any) -> None:
    served = start_server(enable_auto_tool_choice=False)
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=100)
    with client, pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        ask(client)


def test_a_parser_that_is_not_known_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'hermse'"):
        loading_app(ServerArgs(tool_call_parser="hermse"))
