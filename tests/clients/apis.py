"""Runs the clients of the three APIs for conversations against a server, in strict mode where they have one.

pip install openai anthropic openai-agents litellm langchain-openai langchain-anthropic
octavo serve &
python tests/clients/apis.py http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import litellm
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1].rstrip("/")
USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
MESSAGES_TOOL: Any = {"name": "weather", "input_schema": SCHEMA, "strict": True}

strict: Any = {"max_retries": 0, "timeout": 120, "_strict_response_validation": True}
chat = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", **strict)
messages = anthropic.Anthropic(base_url=URL, api_key="none", **strict)
MODEL = chat.models.list().data[0].id
OPENAI: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
failures: list[str] = []


class City(BaseModel):
    """What structured output is parsed as."""

    name: Literal["Rome", "Oslo"]
    big: bool


def check(name: str, run: Callable[[], Any]) -> None:
    """Print what a check returns; it fails when that is empty or it raises."""
    try:
        result = run()
        assert result, f"{result!r}"
    except Exception as error:
        failures.append(name)
        result = f"{type(error).__name__}: {error}"
    print("FAIL" if name in failures else "ok  ", name, str(result)[:200])


def chat_tools() -> Any:
    once: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    first = chat.chat.completions.create(model=MODEL, messages=USER, tools=[CHAT_TOOL], **once)
    [call] = first.choices[0].message.tool_calls or []
    assert first.choices[0].finish_reason == "tool_calls"
    turn: Any = first.choices[0].message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    return (
        chat.chat.completions.create(model=MODEL, messages=[*USER, turn, result], max_tokens=5)
        .choices[0]
        .message.content
    )


def responses_tools() -> Any:
    fields: Any = {"model": MODEL, "tools": [RESPONSES_TOOL]}
    with chat.responses.stream(input="hi", tool_choice="required", parallel_tool_calls=False, **fields) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    output: Any = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    [call] = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [*USER, *output, result]
    return chat.responses.create(input=items, tool_choice="none", max_output_tokens=5, **fields).output_text


def custom_tool() -> Any:
    tools: Any = [{"type": "custom", "name": "patch"}, {"type": "web_search"}]
    response = chat.responses.create(model=MODEL, input="hi", temperature=0, tools=tools, tool_choice="required")
    return [item.input for item in response.output if item.type == "custom_tool_call"]


def parsed_stream() -> Any:
    with chat.responses.stream(model=MODEL, input="hi", text_format=City) as stream:
        assert list(stream)
        return stream.get_final_response().output_parsed


def messages_stream() -> Any:
    with messages.messages.stream(model=MODEL, max_tokens=8, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.text for block in final.content if block.type == "text"] == [text]
    return text, final.stop_reason


def messages_tools() -> Any:
    fields: Any = {"model": MODEL, "max_tokens": 80, "tools": [MESSAGES_TOOL]}
    once: Any = {"type": "any", "disable_parallel_tool_use": True}
    with messages.messages.stream(messages=USER, tool_choice=once, **fields) as stream:
        first = stream.until_done() or stream.get_final_message()
    assert first.stop_reason == "tool_use"
    [use] = [block for block in first.content if block.type == "tool_use"]
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]}
    turns = [*USER, first.to_param(), result]
    return use.input, messages.messages.create(messages=turns, tool_choice={"type": "none"}, **fields).content


def messages_error() -> Any:
    try:
        messages.messages.create(model="nope", max_tokens=8, messages=USER)
    except anthropic.NotFoundError as error:
        return error.type == "not_found_error"
    return False


cities: list[str] = []


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    cities.append(city)
    return "sunny"


def agent(kind: Any, *, streams: bool) -> Any:
    async def run() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=120)
        model = kind(model=MODEL, openai_client=client)
        of = Agent(name="a", instructions="Be short.", model=model, tools=[weather], model_settings=settings)
        if not streams:
            return (await Runner.run(of, "hi", max_turns=3)).final_output
        result = Runner.run_streamed(of, "hi", max_turns=3)
        assert [event async for event in result.stream_events()]
        return result.final_output

    num_calls = len(cities)
    text = asyncio.run(run())
    assert len(cities) == num_calls + 1
    return text


def langchain(name: str, model: Any) -> None:
    tool = {"name": "weather", "description": "the weather", "parameters": SCHEMA}
    check(f"langchain {name}", lambda: model.invoke("hi").content)
    check(f"langchain {name}: stream", lambda: len(list(model.stream("hi"))))
    check(f"langchain {name}: tools", lambda: model.bind_tools([tool], tool_choice="any").invoke("hi").tool_calls)
    check(
        f"langchain {name}: structured", lambda: model.with_structured_output(City, method="json_schema").invoke("hi")
    )


def main() -> int:
    """Run all checks and return the exit status."""
    set_tracing_disabled(True)
    litellm.telemetry = False
    short: Any = {"messages": USER, "max_tokens": 5}
    check("openai chat: tools", chat_tools)
    completions = chat.chat.completions
    check("openai chat: parse", lambda: completions.parse(model=MODEL, messages=USER, response_format=City).choices)
    check("openai responses", lambda: chat.responses.create(model=MODEL, input="hi").output_text)
    check(
        "openai responses: parse", lambda: chat.responses.parse(model=MODEL, input="hi", text_format=City).output_parsed
    )
    check("openai responses: stream and parse", parsed_stream)
    check("openai responses: tools", responses_tools)
    check("openai responses: custom tool", custom_tool)
    check("anthropic", lambda: messages.messages.create(model=MODEL, max_tokens=8, messages=USER).content)
    check("anthropic: stream", messages_stream)
    check("anthropic: tools", messages_tools)
    check("anthropic: count_tokens", lambda: messages.messages.count_tokens(model=MODEL, messages=USER).input_tokens)
    parse = messages.messages.parse
    check(
        "anthropic: parse", lambda: parse(model=MODEL, max_tokens=400, messages=USER, output_format=City).parsed_output
    )
    check("anthropic: error", messages_error)
    check("agents, responses", lambda: agent(OpenAIResponsesModel, streams=False))
    check("agents, responses: stream", lambda: agent(OpenAIResponsesModel, streams=True))
    check("agents, chat", lambda: agent(OpenAIChatCompletionsModel, streams=False))
    check("litellm chat", lambda: litellm.completion(**OPENAI, **short).choices[0].message.content)
    check("litellm chat: stream", lambda: list(litellm.completion(**OPENAI, **short, stream=True)))
    check("litellm responses", lambda: litellm.responses(**OPENAI, input="hi", max_output_tokens=5).output[0].content)
    check("litellm messages", lambda: litellm.completion(**ANTHROPIC, **short).choices[0].message.content)
    called: Any = {"messages": USER, "max_tokens": 80, "tools": [CHAT_TOOL], "tool_choice": "required"}
    check("litellm messages: tools", lambda: litellm.completion(**ANTHROPIC, **called).choices[0].message.tool_calls)
    fields: Any = {"model": MODEL, "api_key": "none", "max_tokens": 400, "temperature": 0}
    langchain("chat", ChatOpenAI(base_url=f"{URL}/v1", **fields))
    langchain("responses", ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **fields))
    langchain("messages", ChatAnthropic(base_url=URL, **fields))
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
