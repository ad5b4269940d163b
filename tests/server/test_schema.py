"""Requests: every list and text has a limit, and every field of other servers is honoured, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from octavo.core.request_limits import REQUEST_LIMITS
from octavo.errors import InvalidRequest
from octavo.server.decode import decode, refused_fields
from octavo.server.endpoints import ENDPOINTS
from octavo.server.schema.chat import ChatCompletionRequest, Message
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.tokens import DetokenizeRequest, PrefixRequest, TokenizeRequest
from tests.server.conftest import Served
from tests.server.raw import ask

REQUESTS = dict.fromkeys(endpoint.request for endpoint in ENDPOINTS if endpoint.request is not None)
ENDLESS = (inspect.StrType, inspect.ListType, inspect.DictType, inspect.AnyType)


def grows(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return grows(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(grows(inner) for inner in kind.types)
    return isinstance(kind, ENDLESS)


@pytest.mark.parametrize("kind", [*REQUESTS, Message])
def test_every_field_that_can_grow_has_a_limit(kind: Any) -> None:
    """A field that is refused holds nothing; all others that hold lists or texts stand in the table."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    prefix = "messages[]." if kind is Message else ""
    missing = [
        field.name
        for field in info.fields
        if grows(field.type)
        and field.name not in refused_fields(kind)
        and f"{prefix}{field.name}" not in REQUEST_LIMITS
    ]
    assert not missing, "enter them into REQUEST_LIMITS, octavo/core/request_limits.py"


def refusal(kind: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(fields).encode(), kind)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", ["x" * 30_000_000]),
        ("stop", ["x" * 257]),
        ("stop_token_ids", [1] * 1025),
        ("allowed_token_ids", [1] * 16_385),
        ("logit_bias", {str(number): 1 for number in range(1025)}),
        ("user", "x" * 257),
        ("cache_salt", "x" * 1025),
        ("model", "x" * 1025),
        ("metadata", {"a": "x" * 513}),
        ("chat_template_kwargs", {"a": [[]] * 1024}),
        ("chat_template", "x" * 65_537),
        ("prompt_cache_key", "x" * 257),
    ],
)
def test_long_values_are_refused_when_the_body_is_decoded(field: str, value: Any) -> None:
    error = refusal(ChatCompletionRequest, messages=[{"role": "user", "content": "a"}], **{field: value})
    assert str(error.field).startswith(field)
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": "a"}] * 4097, "messages"),
        ([{"role": "user", "content": "a", "name": "x" * 257}], "messages[0].name"),
        ([{"role": "user", "content": "x" * (1 << 20)}] * 3, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 1025}], "messages[0].content"),
        ([{"role": "user", "content": "a", "annotations": [0] * 2000}], "messages[0].annotations"),
    ],
)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest, PrefixRequest])
def test_messages_are_limited_wherever_they_are_sent(kind: Any, messages: list[Any], field: str) -> None:
    assert refusal(kind, messages=messages).field == field


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["a"] * 2049}, "2,049 entries"),
        ({"prompt": ["x" * 1_500_000] * 3}, "4,500,000 characters together"),
        ({"prompt": ["a"] * 2000, "n": 3}, "6,000 sequences"),
        ({"prompt": [[1] * 600_000] * 2}, "1,200,000 token ids"),
    ],
)
def test_prompts_are_limited_together(fields: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps(fields).encode(), CompletionRequest).listed()
    assert words in str(caught.value)
    assert caught.value.field == "prompt"


def test_ids_to_decode_are_limited() -> None:
    assert refusal(DetokenizeRequest, tokens=[1] * ((1 << 20) + 1)).field == "tokens"


PATHS = {ChatCompletionRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}
NEEDED = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    CompletionRequest: {"prompt": "a", "max_tokens": 1},
}

BOTH = {
    "vLLM": """
add_special_tokens allowed_token_ids bad_words best_of cache_salt ec_transfer_params ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logits_processors logprob_token_ids min_p min_tokens
priority prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
""",
    "SGLang": """
bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor custom_params
data_parallel_rank ebnf extra_key ignore_eos json_schema lora_path min_p min_tokens no_stop_trim priority regex
repetition_penalty return_hidden_states return_routed_experts rid routed_dp_rank session_params skip_special_tokens
stop_regex stop_token_ids top_k
""",
    "llama.cpp": """
cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
dynatemp_range grammar grammar_lazy grammar_triggers id_slot ignore_eos json_schema lora min_keep min_p mirostat
mirostat_eta mirostat_tau n_cmpl n_discard n_indent n_keep n_predict n_probs post_sampling_probs preserved_tokens
repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers t_max_predict_ms timings_per_token
top_k top_n_sigma typical_p xtc_probability xtc_threshold
""",
    "TGI": "best_of seed stop stream temperature top_p",
}
CHAT = {
    "vLLM": """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning
media_io_kwargs mm_processor_kwargs reasoning_effort
""",
    "SGLang": "chat_template_kwargs continue_final_message separate_reasoning stream_reasoning",
    "llama.cpp": "parse_tool_calls reasoning_format thinking_forced_open",
    "TGI": "guideline tool_prompt",
}


def cases() -> Iterator[tuple[type, str, set[str]]]:
    yield ChatCompletionRequest, "OpenAI", set(chats.CompletionCreateParamsBase.__annotations__) | {"stream"}
    yield CompletionRequest, "OpenAI", set(completions.CompletionCreateParamsBase.__annotations__) | {"stream"}
    for server, names in BOTH.items():
        yield CompletionRequest, server, set(names.split())
        yield ChatCompletionRequest, server, set(f"{names} {CHAT[server]}".split())


@pytest.mark.parametrize(("kind", "server", "names"), list(cases()))
def test_each_field_is_known(kind: type, server: str, names: set[str]) -> None:
    assert names - set(kind.__struct_fields__) == set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_refused_fields_name_themselves_and_a_remedy_or_a_reason(
    server: Served, kind: type[ChatCompletionRequest] | type[CompletionRequest]
) -> None:
    for name, mark in refused_fields(kind).items():
        answer = ask(server.url, PATHS[kind], {**NEEDED[kind], name: "something else"})
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, name, "unsupported_parameter")
        assert answer.error["message"] == f"{name} is not supported: {mark.because}"
    harmless = {name: mark.harmless[0] for name, mark in refused_fields(kind).items() if mark.harmless}
    assert ask(server.url, PATHS[kind], {**NEEDED[kind], **harmless}).status == 200


# each line: what a client sent to a router, and what the router sent on to octavo
RECORDED = [json.loads(line) for line in (Path(__file__).parent / "router_requests.jsonl").read_text().splitlines()]
ADDED = ("no_stop_trim", "return_hidden_states", "separate_reasoning", "stream_reasoning", "include_reasoning")
DROPPED = {"cache_salt", "priority", "request_id"}
"""What some routers leave out; clients of these go without it."""


def engine_requests(server: Served, path: str, body: dict[str, Any]) -> list[Any]:
    server.llm.requests.clear()
    answer = ask(server.url, path, body)
    assert answer.status == 200, answer.body
    return [request[1:] for request in server.llm.requests]


@pytest.mark.parametrize("case", RECORDED, ids=[f"{case['router']}-{case['path']}" for case in RECORDED])
def test_the_engine_gets_what_the_client_sent_to_the_router(server: Served, case: dict[str, Any]) -> None:
    dropped = {name for name in DROPPED if name not in case["forwarded"]}
    sent = {name: value for name, value in case["sent"].items() if name not in dropped}
    forwarded = engine_requests(server, case["path"], case["forwarded"])
    assert forwarded == engine_requests(server, case["path"], sent)


def test_every_added_field_is_in_a_recorded_request() -> None:
    assert {name for case in RECORDED for name in case["forwarded"] if name in ADDED} == {*ADDED}
    assert {*refused_fields(ChatCompletionRequest), *ChatCompletionRequest.__struct_fields__} >= {*ADDED}


def test_an_answer_repeats_the_text_alone_of_a_turn_with_images() -> None:
    parts = [
        {"type": "text", "text": "I am"},
        {"type": "image_url", "image_url": "data:"},
        {"type": "text", "text": "."},
    ]
    body = {"messages": [{"role": "assistant", "content": parts}], "echo": True}
    assert decode(json.dumps(body).encode(), ChatCompletionRequest).echoed_text == "I am\n."
