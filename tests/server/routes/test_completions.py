"""`/v1/completions` through the openai client."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import openai
import pytest

from octavo.core import request_limits
from tests.server.conftest import Served
from tests.server.raw import ask, events


def complete(server: Served, **fields: Any) -> Any:
    return ask(server.url, "/v1/completions", {"prompt": "ab", **fields})


def test_tokens_of_log_probabilities_are_shown_by_ids_where_that_is_asked_for(
    server: Served, start_server: Callable[..., Served]
) -> None:
    fields: dict[str, Any] = {"prompt": "hi", "logprobs": 1, "echo": True, "max_tokens": 2}
    texts, ids = (
        ask(server.url, "/v1/completions", {**fields, "return_tokens_as_token_ids": shows_ids}).json["choices"][0]
        for shows_ids in (False, True)
    )
    assert texts["logprobs"]["tokens"] == ["<s>", "h", "i", "B", "l"]
    assert ids["logprobs"]["tokens"] == [f"token_id:{number}" for number in (0, *b"hiBl")]
    assert ids["logprobs"]["top_logprobs"][3].keys() == {"token_id:66", "token_id:67"}
    assert (ids["text"], ids["logprobs"]["text_offset"]) == (texts["text"], texts["logprobs"]["text_offset"])
    served = start_server(return_tokens_as_token_ids=True)
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    [token] = ask(served.url, "/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"], token["top_logprobs"][0]["token"]) == ("token_id:66", [66], "token_id:67")
    chat["return_tokens_as_token_ids"] = False
    [token] = ask(served.url, "/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert token["token"] == "B"


def test_answer_has_what_the_openai_api_promises(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="letters", prompt="ab", max_tokens=6)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "letters")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "Blocks", "length", None)
    assert answer.usage.to_dict() == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1, "fetched_tokens": 1, "computed_tokens": 1},
    }
    assert len(client.completions.create(model="letters", prompt="ab").choices[0].text) == 16


def test_log_probabilities_without_end_are_streamed_or_refused(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "MAX_RESPONSE_LOGPROBS", 25)
    fields = {"logprobs": 2, "max_tokens": 5}
    assert complete(server, prompt=["ab", "cd"], **fields).status == 200
    refused = complete(server, prompt=["ab", "cd", "ef"], **fields)
    assert (refused.status, refused.json["error"]["code"]) == (400, "response_too_large")
    assert "has more than 25 log-probabilities; set stream to true, or ask" in refused.json["error"]["message"]
    assert complete(server, prompt=["ab", "cd", "ef"], **fields, stream=True).status == 200


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_prompt_is_text_or_ids_or_lists_of_them(server: Served, prompt: Any, texts: list[str]) -> None:
    answer = complete(server, prompt=prompt, max_tokens=2, n=2, echo=True).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
    assert [choice["text"] for choice in answer["choices"]] == [text + "Bl" for text in texts for _ in range(2)]
    assert answer["usage"]["completion_tokens"] == 4 * len(texts)


def test_stream_is_text_then_finish_reason_then_usage_then_done(server: Served) -> None:
    answer = complete(server, max_tokens=2, stream=True, stream_options={"include_usage": True})
    *chunks, done = events(answer.body)
    assert done == "[DONE]"
    assert [[(choice["text"], choice["finish_reason"]) for choice in chunk["choices"]] for chunk in chunks] == [
        [("B", None)],
        [("l", None)],
        [("", "length")],
        [],
    ]
    assert [chunk["usage"] and chunk["usage"]["total_tokens"] for chunk in chunks] == [None, None, None, 5]


def test_streams_of_several_prompts_have_different_indices(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    finished = []
    stream = client.completions.create(model="letters", prompt=["a", "b"], n=2, max_tokens=3, stream=True, echo=True)
    for chunk in stream:
        (choice,) = chunk.choices
        assert choice.index not in finished
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == {0: "aBlo", 1: "aBlo", 2: "bBlo", 3: "bBlo"}
    assert sorted(finished) == [0, 1, 2, 3]


def test_logprobs_are_parallel_lists(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="letters", prompt="ab", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (["B", "l"], [0, 1])
    assert logprobs.token_logprobs == pytest.approx([-1.386, -1.386], abs=1e-3)
    assert [list(top) for top in logprobs.top_logprobs or []] == [["C", "B"], ["m", "l"]]


def test_echo_with_logprobs_covers_the_prompt_as_evaluations_expect(server: Served) -> None:
    (choice,) = complete(server, prompt=[97, 98], echo=True, logprobs=1, max_tokens=1).json["choices"]
    assert choice["text"] == "abB"
    logprobs = choice["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["a", "b", "B"], [0, 1, 2])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert list(logprobs["top_logprobs"][1]) == ["c", "b"]
    params = server.llm.requests[0][2]
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)


def test_special_tokens_of_an_echoed_text_are_those_of_its_ids(server: Served) -> None:
    (choice,) = complete(server, prompt="ab", echo=True, logprobs=0, max_tokens=1).json["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "B"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    (choice,) = complete(server, prompt=[0, 97, 0, 98], echo=True, max_tokens=1).json["choices"]
    assert choice["text"] == "<s>a<s>bB"


def test_echo_alone_generates_nothing(server: Served) -> None:
    answer = complete(server, prompt=[97, 98], echo=True, logprobs=1, max_tokens=0).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == ("ab", ["a", "b"], "length")
    assert answer["usage"]["completion_tokens"] == 0
    *chunks, _ = events(complete(server, prompt=[97, 98], echo=True, max_tokens=0, stream=True).body)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", ""]


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Served) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 4}
    (whole,) = complete(server, **fields).json["choices"]
    *chunks, _ = events(complete(server, **fields, stream=True).body)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces for value in piece[name]] == values, name
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


def test_token_ids_and_prompt_logprobs_come_on_request(server: Served) -> None:
    (choice,) = complete(server, max_tokens=2, return_token_ids=True, prompt_logprobs=1).json["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([0, 97, 98], [66, 108])
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert second["97"] == {"logprob": pytest.approx(-1.386, abs=1e-3), "rank": 2, "decoded_token": "a"}


def test_requests_of_one_id_do_not_collide_in_the_engine(server: Served) -> None:
    for _ in range(2):
        answer = complete(server, prompt=["a", "b"], max_tokens=1, request_id="mine")
        assert answer.json["id"] == "cmpl-mine"
    assert len({request_id for request_id, *_ in server.llm.requests}) == 4


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "invalid_type"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
        ({"prompt": [10**30]}, "prompt[0]", "invalid_value"),
        ({"prompt": [5000]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 2049}, "prompt", "invalid_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 1, "n": 2}, "best_of", "invalid_value"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"stop": ["x"] * 65}, "stop", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"request_id": "a b"}, "request_id", "invalid_value"),
        ({"echo": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
        ({"prompt_embeds": "AAAA"}, "prompt", "invalid_value"),
        ({"prompt": "", "prompt_embeds": "AAAA"}, "prompt_embeds", "invalid_value"),
        ({"prompt": None, "prompt_embeds": []}, "prompt_embeds", "invalid_value"),
        ({"prompt": None, "prompt_embeds": "AAAA", "echo": True}, "echo", "invalid_value"),
    ],
)
def test_refusal_names_the_field(server: Served, fields: Any, param: str, code: str) -> None:
    answer = complete(server, **fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert "prompt_token_ids" not in answer.error["message"]


def test_one_refused_prompt_refuses_the_request_and_ends_the_others(server: Served) -> None:
    server.llm.endless = True
    assert complete(server, prompt=["a", ""], stream=True).status == 400
    # the first prompt was running or had not been started
    assert len(server.llm.aborted) == len(server.llm.requests)


def test_the_best_of_several_and_the_best_beams_come_in_the_order_of_their_scores(server: Served) -> None:
    drawn = complete(server, n=2, best_of=4, max_tokens=4, seed=1, logprobs=0, temperature=1.0).json["choices"]
    searched = complete(server, n=2, best_of=3, use_beam_search=True, max_tokens=4, logprobs=0).json["choices"]
    for choices in (drawn, searched):
        assert [choice["index"] for choice in choices] == [0, 1]
        scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_all_sequences_that_were_computed(server: Served, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for fields, num_tokens in (({"n": 2, "best_of": 4}, 24), ({"n": 2}, 12), ({"n": 2, "use_beam_search": True}, 12)):
        answer = complete(server, prompt="ab", max_tokens=6, **fields, **options)
        usage = (events(answer.body)[-2] if stream else answer.json)["usage"]
        assert usage["completion_tokens"] == num_tokens
        assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens


def test_best_of_equal_to_n_is_accepted(server: Served) -> None:
    assert complete(server, n=2, best_of=2, max_tokens=1).status == 200
    assert complete(server, best_of=1, suffix="", max_tokens=1).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_reported_for_each_prompt_on_request(server: Served, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = complete(server, prompt=["ab", "abcde"], max_tokens=2, return_cache_info=True, **options)
    usage = (events(answer.body)[-2] if stream else answer.json)["usage"]
    assert usage["prompt_tokens"] == 9
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 4,
        "fetched_tokens": 2,
        "computed_tokens": 3,
        "cache_info": [
            {"prompt_tokens": 3, "cached_tokens": 1, "miss_reason": None, "fetched_tokens": 1},
            {"prompt_tokens": 6, "cached_tokens": 3, "miss_reason": "the next block is new", "fetched_tokens": 1},
        ],
    }


def test_log_probabilities_of_named_tokens_replace_those_of_the_likeliest(server: Served) -> None:
    fields = {"max_tokens": 1, "logprob_token_ids": [98, 97], "logprobs": 3}
    [choice] = complete(server, **fields).json["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"B": -math.log(2), "a": -97.0, "b": -98.0}]
    chat = {"messages": [{"role": "user", "content": "a"}], **fields, "logprobs": True, "top_logprobs": 1}
    [token] = ask(server.url, "/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in token["top_logprobs"]] == [
        ("B", -math.log(2)),
        ("a", -97.0),
        ("b", -98.0),
    ]
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": chat["messages"]})):
        error = ask(server.url, f"/v1/{path}", body | {"logprob_token_ids": [97]}).error
        assert error["param"] == "logprob_token_ids"
        assert error["message"].startswith("logprob_token_ids needs logprobs")
