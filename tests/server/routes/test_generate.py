"""`POST /inference/v1/generate`: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.raw import Answer, ask, events

PATH = "/inference/v1/generate"


def generate(server: Served, params: dict[str, Any], **fields: Any) -> Answer:
    return ask(server.url, PATH, {"token_ids": [97, 98], "sampling_params": params, **fields})


def test_tokens_are_those_of_a_completion_of_the_same_tokens(server: Served) -> None:
    params = {"max_tokens": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    answer = generate(server, params, return_token_ids=True, request_id="r", cache_salt="s").json
    body = {"prompt": [97, 98], "return_token_ids": True, "cache_salt": "s", **params}
    whole = ask(server.url, "/v1/completions", body).json
    (_, first, asked, options), (_, second, same, others) = server.llm.requests
    assert (first.token_ids, asked, options) == (second.token_ids, same, others)
    assert (answer["request_id"], answer["output_mode"]) == ("generate-tokens-r", "tokens")
    assert (answer["model"], answer["prompt_token_ids"]) == ("letters", [97, 98])
    assert answer["usage"] == whole["usage"]
    assert answer["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
    for found, choice in zip(answer["choices"], whole["choices"], strict=True):
        assert [found[name] for name in ("index", "token_ids", "finish_reason", "stop_reason")] == [
            choice[name] for name in ("index", "token_ids", "finish_reason", "stop_reason")
        ]
        content = found["logprobs"]["content"]
        assert [each["token_id"] for each in content] == choice["token_ids"]
        assert [each["token"] for each in content] == [f"token_id:{each}" for each in choice["token_ids"]]
        assert [each["logprob"] for each in content] == choice["logprobs"]["token_logprobs"]
        assert [each["top_logprobs"][0]["token_id"] for each in content] == choice["token_ids"]
        assert "text" not in found


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_sequence_says_which_weights_drew_its_tokens(server: Served, stream: bool) -> None:
    ask(server.url, "/update_weight_version", {"new_version": "7"})
    answer = generate(server, {"max_tokens": 3, "n": 2}, stream=stream)
    chunks = events(answer.body)[:-1] if stream else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = [each["weight_versions"] for each in choices if each["finish_reason"] is not None]
    assert found == [[{"version": "7", "start": 0, "end": 3}]] * 2
    assert all(each["weight_versions"] is None for each in choices if each["finish_reason"] is None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_of_other_apis_say_it_on_request(server: Served, path: str, stream: bool) -> None:
    body = {"max_tokens": 3, "n": 2, "stream": stream}
    body |= {"prompt": "ab"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "ab"}]}

    def spans(**fields: Any) -> list[Any]:
        answer = ask(server.url, path, body | fields)
        chunks = events(answer.body)[:-1] if stream else [answer.json]
        return [each.get("weight_versions") for chunk in chunks for each in chunk["choices"] if each["finish_reason"]]

    assert spans() == [None, None]
    ask(server.url, "/update_weight_version", {"new_version": "7"})
    assert spans(return_weight_versions=True) == [[{"version": "7", "start": 0, "end": 3}]] * 2


def test_without_a_limit_the_context_is_one(server: Served) -> None:
    generate(server, {"detokenize": False, "output_kind": 2, "flat_logprobs": True})
    assert server.llm.requests[-1][2].max_tokens is None


def test_text_comes_where_it_is_asked_for(server: Served) -> None:
    [choice] = generate(server, {"max_tokens": 2, "logprobs": 0}, output_mode="text").json["choices"]
    whole = ask(server.url, "/v1/completions", {"prompt": [97, 98], "max_tokens": 2, "logprobs": 0}).json
    assert choice["text"] == whole["choices"][0]["text"]
    assert [each["token"] for each in choice["logprobs"]["content"]] == whole["choices"][0]["logprobs"]["tokens"]


def test_a_stream_has_the_tokens_in_pieces(server: Served) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks = events(generate(server, {"max_tokens": 4}, **fields).body)
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    assert [each["prompt_token_ids"] for each in chunks] == [[97, 98], *[None] * (len(chunks) - 1)]
    whole = generate(server, {"max_tokens": 4}).json["choices"][0]
    assert [token for each in chunks for token in each["choices"][0]["token_ids"]] == whole["token_ids"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [97] * 300}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": "a"}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_wrong_requests_are_refused_by_field(server: Served, changes: dict[str, Any], param: str) -> None:
    answer = ask(server.url, PATH, {"token_ids": [97], "sampling_params": {}, **changes})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "sampling_params.sampling_params" not in answer.error["message"]
