"""`/v1/chat/completions` through the openai client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from octavo.core.outputs import RequestMetrics
from octavo.core.sampling_params import OutputKind
from tests.server.conftest import Served
from tests.server.fake_llm import SENTENCE
from tests.server.raw import ask, events

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def chat(server: Served, **fields: Any) -> Any:
    return ask(server.url, "/v1/chat/completions", {"messages": MESSAGES, **fields})


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "letters", "messages": MESSAGES, **fields})


def test_answer_has_what_the_openai_api_promises(client: openai.OpenAI, server: Served) -> None:
    answer = create(client, max_tokens=6)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "letters")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Blocks")
    prompt_tokens = len("user: hi\nassistant: ")
    assert answer.usage.to_dict() == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
        "prompt_tokens_details": {
            "cached_tokens": prompt_tokens // 2,
            "fetched_tokens": 1,
            "computed_tokens": (prompt_tokens - 1) // 2,
        },
    }


def test_conversation_has_no_limit_of_tokens_unless_one_is_given(client: openai.OpenAI, server: Served) -> None:
    answer = create(client)
    assert answer.choices[0].message.content == SENTENCE
    create(client, max_completion_tokens=3)
    assert [params.max_tokens for _, _, params, _ in server.llm.requests] == [None, 3]


def test_a_limit_of_the_checkpoint_makes_room_for_min_tokens(
    client: openai.OpenAI, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(server.llm.config.model, generation_defaults={"max_tokens": 2})
    monkeypatch.setattr(server.llm, "config", msgspec.structs.replace(server.llm.config, model=model))
    create(client)
    create(client, extra_body={"min_tokens": 5})
    assert [params.max_tokens for _, _, params, _ in server.llm.requests] == [2, 5]


def test_a_server_may_count_the_tokens_of_every_stream(start_server: Callable[..., Served]) -> None:
    server = start_server(enable_force_include_usage=True)
    for asked in ({}, {"stream_options": {"include_usage": False}}):
        *chunks, last, _ = events(chat(server, max_tokens=2, stream=True, **asked).body)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2
        assert all(chunk["usage"] is None for chunk in chunks)
    assert "usage" in json.loads(chat(server, max_tokens=2).body)


def test_stream_is_role_then_text_then_finish_reason_then_usage_then_done(server: Served) -> None:
    answer = chat(server, max_tokens=2, stream=True, stream_options={"include_usage": True})
    assert server.llm.requests[0][2].output_kind is OutputKind.DELTA
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(answer.body)
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "B"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "l"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        [],
    ]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


def test_a_search_that_finds_fewer_than_n_has_so_many_choices(server: Served) -> None:
    server.llm.num_beams = 2
    asked = {"n": 4, "use_beam_search": True, "max_tokens": 1}
    assert [choice["index"] for choice in chat(server, **asked).json["choices"]] == [0, 1]
    *chunks, _ = events(chat(server, stream=True, **asked).body)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert roles == ends == [0, 1]


def test_usage_comes_with_no_chunk_or_with_every_one_as_it_is_asked_for(server: Served) -> None:
    *chunks, _ = events(chat(server, max_tokens=2, stream=True).body)
    assert len(chunks) == 4
    assert not any("usage" in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(chat(server, max_tokens=2, stream=True, stream_options=options).body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2, 2]


def test_choices_keep_their_index(client: openai.OpenAI, server: Served) -> None:
    answer = create(client, n=3, max_tokens=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "Bl"), (1, "Bl"), (2, "Bl")]
    assert answer.usage.completion_tokens == 6
    by_index: dict[int, list[Any]] = {}
    for chunk in create(client, n=3, max_tokens=2, stream=True):
        by_index.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
    assert sorted(by_index) == [0, 1, 2]
    for choices in by_index.values():
        assert [choice.delta.role for choice in choices] == ["assistant", None, None, None]
        assert [choice.delta.content for choice in choices] == ["", "B", "l", None]
        assert [choice.finish_reason for choice in choices] == [None, None, None, "length"]


def test_logprobs_name_the_drawn_token_and_the_likeliest(client: openai.OpenAI, server: Served) -> None:
    answer = create(client, max_tokens=2, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    first = logprobs.content[0]
    assert (first.token, first.bytes) == ("B", [66])
    assert first.logprob == pytest.approx(-1.386, abs=1e-3)
    assert [(top.token, top.bytes) for top in first.top_logprobs] == [("C", [67]), ("B", [66])]
    assert [token.token for token in logprobs.content] == ["B", "l"]
    answer = create(client, max_tokens=1, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs.content[0].top_logprobs == []
    assert server.llm.requests[-1][2].logprobs == 0


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = create(client, max_tokens=5, logprobs=True, top_logprobs=1)
    stream = create(client, max_tokens=5, logprobs=True, top_logprobs=1, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    joined = [token for piece in pieces if piece is not None for token in piece.content or []]
    assert joined == whole.choices[0].logprobs.content


def test_a_message_without_reasoning_says_so(client: openai.OpenAI) -> None:
    message: Any = create(client, max_tokens=1).choices[0].message
    assert (message.reasoning, message.reasoning_content) == (None, None)


def test_messages_reach_the_template_as_text(client: openai.OpenAI, server: Served) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    create(client, messages=messages, max_tokens=1)
    prompt = server.llm.requests[0][1]
    assert prompt.text == "system: be brief\nuser: a\nb\nassistant: c\ntool: d\nassistant: "
    assert not prompt.add_special_tokens


def test_marks_of_caches_and_of_other_clients_change_no_prompt(client: openai.OpenAI, server: Served) -> None:
    server.llm.max_prompt_len = 4096
    marks: Any = {"cache_control": {"type": "ephemeral"}}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {}, **marks}], **marks},
        {"role": "assistant", "content": "b", "provider_specific_fields": {"refusal": None}, "prefix": False},
    ]
    tools: Any = [{"type": "function", "function": {"name": "f", **marks}, **marks}]
    plain: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    create(client, messages=messages, tools=tools, max_tokens=1)
    create(client, messages=plain, tools=[{"type": "function", "function": {"name": "f"}}], max_tokens=1)
    marked, unmarked = (prompt.text for _, prompt, _, _ in server.llm.requests)
    assert marked == unmarked


@pytest.mark.parametrize("left", [{"reasoning": "hm"}, {}, {"tool_calls": []}])
def test_a_turn_that_ended_within_its_reasoning_needs_no_content(
    client: openai.OpenAI, server: Served, left: dict[str, Any]
) -> None:
    turn: Any = {"role": "assistant", "content": None, **left}
    create(client, messages=[*MESSAGES, turn, *MESSAGES], max_tokens=1)
    assert "\nassistant: \n" in server.llm.requests[0][1].text


def test_a_predicted_output_goes_with_the_prompt(client: openai.OpenAI, server: Served) -> None:
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in ("ab", parts):
        prediction: Any = {"type": "content", "content": content}
        create(client, max_tokens=1, prediction=prediction)
    assert [request[1].prediction for request in server.llm.requests] == ["ab", "ab"]


def test_final_message_can_be_continued(client: openai.OpenAI, server: Served) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "well,"}]
    create(client, messages=messages, max_tokens=1, extra_body={"continue_final_message": True})
    assert server.llm.requests[0][1].text == "user: hi\nassistant: well,"


def test_sampling_values_reach_the_engine_over_the_models_defaults(client: openai.OpenAI, server: Served) -> None:
    create(
        client,
        max_tokens=4,
        temperature=0.5,
        seed=3,
        stop=["x", "y"],
        logit_bias={"65": -100},
        user="alice",
        extra_body={
            "min_p": 0.1,
            "stop_token_ids": [5],
            "ignore_eos": True,
            "cache_salt": "s",
            "priority": 2,
            "first_token_deadline_s": 9.5,
        },
    )
    _, _, params, options = server.llm.requests[0]
    assert (params.temperature, params.seed, params.stop, params.min_p) == (0.5, 3, ("x", "y"), 0.1)
    assert (params.logit_bias, params.stop_token_ids, params.ignore_eos) == ({65: -100.0}, (5,), True)
    assert params.top_k == 7
    expected = {
        "cache_salt": "s",
        "priority": 2,
        "first_token_deadline_s": 9.5,
        "tenant": "alice",
        "lora_request": None,
    }
    assert options == expected


def test_token_ids_come_on_request(server: Served) -> None:
    answer = chat(server, max_tokens=2, return_token_ids=True, prompt_logprobs=1).json
    assert answer["choices"][0]["token_ids"] == [66, 108]
    assert answer["prompt_token_ids"] == [ord(letter) for letter in "user: hi\nassistant: "]
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    *chunks, _ = events(chat(server, max_tokens=2, return_token_ids=True, stream=True).body)
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [66], [108], None]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "a"}}] * 2}, "tools[1].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "a"}}] * 513}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"tools": [{"function": {"name": "a"}}], "tool_choice": {"function": {"name": "b"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content", "invalid_type"),
        ({"prediction": {"type": "content", "content": "x" * 1048577}}, "prediction", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "invalid_grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"use_beam_search": True, "min_p": 0.5}, "min_p", "invalid_value"),
        ({"chat_template": "{{ messages }}"}, "chat_template", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
        ({"n": 100}, "n", "request_too_large"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "context_length_exceeded"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "unknown_parameter",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        (
            {"messages": [{"role": "assistant", "content": "x", "thinking_blocks": [{}]}]},
            "messages[0].thinking_blocks",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
            "messages[0].prefix",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].contnt", "unknown_parameter"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "file"}]}]},
            "messages[0].content[1]",
            "unsupported_content_type",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "invalid_value"),
    ],
)
def test_refusal_names_the_field(client: openai.OpenAI, server: Served, fields: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, extra_body=fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert server.llm.requests == []


def test_refusal_in_a_stream_comes_before_the_stream(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, max_tokens=10**6, stream=True)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None, "tool_choice": "none", "functions": [], "response_format": {"type": "text"}},
        {"modalities": ["text"], "store": False, "metadata": {"a": "b"}, "user": "u", "parallel_tool_calls": True},
        {"store": True, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "prompt_cache_key": "a"},
        {"top_logprobs": 0, "guided_decoding_backend": "xgrammar", "logits_processors": [], "mm_processor_kwargs": {}},
        {
            "structured_outputs": {
                "choice": ["a"],
                "regex": None,
                "disable_fallback": True,
                "disable_additional_properties": False,
            }
        },
        {"temperature": None, "stop": None, "n": None, "logprobs": False, "stream": None, "use_beam_search": False},
    ],
)
def test_fields_that_change_nothing_are_accepted(server: Served, fields: Any) -> None:
    assert chat(server, max_tokens=1, **fields).status == 200


def test_template_of_a_request_is_used_where_the_server_allows_it(start_server: Any) -> None:
    trusting = start_server(trust_request_chat_template=True)
    assert chat(trusting, max_tokens=1, chat_template="T:").status == 200
    assert trusting.llm.requests[0][1].text.startswith("T:user: hi")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_usage_has_cached_tokens_and_on_request_the_reason_of_a_miss(
    server: Served, stream: bool, wanted: bool
) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = chat(server, max_tokens=2, return_cache_info=wanted, **options)
    usage = (events(answer.body)[-2] if stream else answer.json)["usage"]
    num_tokens = usage["prompt_tokens"]
    num_cached = num_tokens // 2
    details: dict[str, Any] = {"cached_tokens": num_cached, "fetched_tokens": 1}
    details["computed_tokens"] = num_tokens - num_cached - 1
    if wanted:
        info = {"prompt_tokens": num_tokens, "cached_tokens": num_cached, "miss_reason": "the next block is new"}
        details["cache_info"] = [info | {"fetched_tokens": 1}]
    assert usage["prompt_tokens_details"] == details


@pytest.mark.parametrize("stream", [False, True])
def test_usage_has_the_times_of_a_request_on_demand(server: Served, stream: bool) -> None:
    server.llm.metrics_of_request = RequestMetrics(
        arrival_time=1.0, first_scheduled_time=1.25, first_token_time=1.5, last_token_time=2.5
    )
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = chat(server, max_tokens=5, return_timings=True, **options)
    usage = (events(answer.body)[-2] if stream else answer.json)["usage"]
    details = usage["prompt_tokens_details"]
    found, computed = details["cached_tokens"] + details["fetched_tokens"], details["computed_tokens"]
    assert usage["timings"] == [
        {
            "cache_n": found,
            "prompt_n": computed,
            "predicted_n": 5,
            "queue_ms": 250.0,
            "prompt_ms": 250.0,
            "predicted_ms": 1000.0,
            "prompt_per_second": 4.0 * computed,
            "predicted_per_second": 4.0,
        }
    ]
    assert "timings" not in chat(server, max_tokens=1).json["usage"]


def test_echo_begins_with_what_the_request_has_begun(server: Served) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "He said: "}]
    fields = {"messages": begun, "echo": True, "max_tokens": 3, "continue_final_message": True}
    assert chat(server, **fields).json["choices"][0]["message"]["content"] == "He said: Blo"
    chunks = events(chat(server, **fields, stream=True).body)[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "He said: Blo"
    assert chat(server, **{**fields, "messages": MESSAGES}).json["choices"][0]["message"]["content"] == "Blo"
