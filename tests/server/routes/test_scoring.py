"""`POST /generative_scoring`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.config.schema import PoolingConfig
from tests.server.conftest import Served
from tests.server.raw import ask

PATH = "/generative_scoring"


def prompts(server: Served, **fields: Any) -> list[list[int] | None]:
    server.llm.requests.clear()
    assert ask(server.url, PATH, {"label_token_ids": [97], **fields}).status == 200
    return [prompt.token_ids for _, prompt, _, _ in server.llm.requests]


def test_a_query_stands_before_each_item_or_behind_it(server: Served) -> None:
    assert prompts(server, query="ab", items=["c", "de"]) == [[0, 97, 98, 99], [0, 97, 98, 100, 101]]
    assert prompts(server, query="ab", items=["c"], item_first=True) == [[0, 99, 97, 98]]
    assert prompts(server, query="ab", items=["c"], add_special_tokens=False) == [[97, 98, 99]]
    assert prompts(server, query=[97], items=[[98], [99, 100]]) == [[97, 98], [97, 99, 100]]


def test_the_score_is_the_probability_of_the_first_label(server: Served) -> None:
    fields = {"query": "ab", "items": ["c", "d"], "label_token_ids": [97, 98, 97]}
    answer = ask(server.url, PATH, fields, headers={"X-Request-Id": "r"}).json
    ((_, _, params, _), _) = server.llm.requests
    assert (params.max_tokens, params.logprob_token_ids) == (1, (97, 98))
    whole = ask(server.url, PATH, {**fields, "apply_softmax": False}).json
    body = {"prompt": [[0, 97, 98, 99]], "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [97, 98]}
    [position] = ask(server.url, "/v1/completions", body).json["choices"][0]["logprobs"]["top_logprobs"]
    first, second = math.exp(position["a"]), math.exp(position["b"])
    assert whole["data"][0]["score"] == first
    assert answer["data"][0]["score"] == pytest.approx(first / (first + second))
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert (answer["id"], answer["model"], answer["object"]) == ("generative-scoring-r", "letters", "list")
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["a", [97]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"items": ["a", "b" * 300]}, "items"),
        ({"query": "b" * 90_000}, "query"),
        ({"query": [97] * 1000, "items": [[97]] * 1050}, "items"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_wrong_requests_are_refused_by_field(server: Served, changes: dict[str, Any], param: str) -> None:
    answer = ask(server.url, PATH, {"query": "a", "items": ["b"], "label_token_ids": [97], **changes})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_model_for_vectors_and_the_other_endpoint_say_where_to_ask(server: Served) -> None:
    server.llm.pooling = PoolingConfig(size=256)
    answer = ask(server.url, PATH, {"query": "a", "items": ["b"], "label_token_ids": [97]})
    assert (answer.status, answer.error["code"]) == (400, "unsupported_task")
    answer = ask(server.url, "/v1/score", {"queries": "a", "items": ["b"], "label_token_ids": [97]})
    assert "POST /generative_scoring" in answer.error["message"]
