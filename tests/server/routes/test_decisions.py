"""`POST /v1/decisions` through the openai client."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from octavo.config.schema import PoolingConfig
from octavo.core.prompt import Prompt
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.routes.decisions import label_tokens
from tests.server.conftest import Served
from tests.server.raw import ask

PATH = "/v1/decisions"
PREDICATE = {"type": "predicate", "instructions": "It is a greeting.", "name": "greets"}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which?"}, {"type": "input_json", "data": {"a": [1]}}],
    "choices": [{"value": "true", "description": "the word"}, {"value": True}, {"value": "no"}],
}
SCALE = {
    "type": "score",
    "instructions": "How glad?",
    "levels": [{"label": "low"}, {"label": "high", "description": "up"}],
}
ASKED = "hi\n\nQuestion: It is a greeting.\nA: true\nB: false\nAnswer with the letter of one option only."


def decide(client: openai.OpenAI, given: Any, *questions: Any) -> Any:
    return client.decisions.create(model="letters", input=given, questions=questions)


def probabilities(server: Served, messages: Any, letters: str) -> list[float]:
    """What a chat gives for letters as the first token of its answer."""
    ids = [ord(each) for each in letters]
    body = {"messages": messages, "max_tokens": 1, "logprobs": True, "logprob_token_ids": ids, "temperature": 0}
    [position] = ask(server.url, "/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    found = {each["token"]: math.exp(each["logprob"]) for each in position["top_logprobs"]}
    return [found[each] for each in letters]


def test_answers_are_the_probabilities_of_labels_as_the_first_token(client: openai.OpenAI, server: Served) -> None:
    decision = decide(client, "hi", PREDICATE, CHOICE, SCALE)
    prompts = [prompt.text for _, prompt, _, _ in server.llm.requests]
    assert [params.max_tokens for _, _, params, _ in server.llm.requests] == [1, 1, 1]
    of_chat = probabilities(server, [{"role": "user", "content": ASKED}], "ABC")
    assert prompts[0] == f"user: {ASKED}\nassistant: "
    assert 'A: "true" (the word)\nB: true\nC: "no"' in prompts[1]
    assert 'Which?\n{"a":[1]}' in prompts[1]
    assert "A: low\nB: high (up)" in prompts[2]
    predicate, choice, scale = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", "greets")
    assert predicate.probability == pytest.approx(of_chat[0] / sum(of_chat[:2]))
    assert [each.value for each in choice.probabilities] == ["true", True, "no"]
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1.0)
    best = max(choice.probabilities, key=lambda each: each.probability)
    assert (choice.choice, choice.name) == (best.value, None)
    assert 0 < choice.confidence <= best.probability
    assert [(each.value, each.label) for each in scale.probabilities] == [(0, "low"), (1, "high")]
    assert scale.score == pytest.approx(scale.probabilities[1].probability)
    assert decision.usage.input_tokens == sum(map(len, prompts))
    assert (decision.usage.output_tokens, decision.usage.total_tokens) == (3, sum(map(len, prompts)) + 3)


def test_a_question_stands_behind_the_conversation(client: openai.OpenAI, server: Served) -> None:
    turns: Any = [
        {"type": "message", "role": "system", "content": "judge"},
        {"type": "message", "role": "user", "content": [{"type": "input_json", "data": {"b": 2}}]},
    ]
    answered = [*turns, {"type": "message", "role": "assistant", "content": "ok"}]
    decide(client, turns, PREDICATE)
    decide(client, answered, PREDICATE)
    first, second = (prompt.text for _, prompt, _, _ in server.llm.requests)
    assert first.startswith('system: judge\nuser: {"b":2}\n\nQuestion: It')
    assert "assistant: ok\nuser: Question: It" in second


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"questions": []}, "questions"),
        ({"questions": [{**PREDICATE, "choices": []}]}, "questions[0].choices"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [PREDICATE, {**PREDICATE, "instructions": "a" * 300}]}, "questions"),
        ({"questions": [{**CHOICE, "choices": CHOICE["choices"][:1]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": str(each)} for each in range(27)]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**SCALE, "levels": [{"label": str(each)} for each in range(11)]}]}, "questions[0].levels"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_wrong_requests_are_refused_by_field(server: Served, changes: dict[str, Any], param: str) -> None:
    answer = ask(server.url, PATH, {"model": "letters", "input": "hi", "questions": [PREDICATE], **changes})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_inputs_are_repeated_for_each_question_up_to_a_limit(server: Served) -> None:
    answer = ask(server.url, PATH, {"input": "a" * 50_000, "questions": [PREDICATE] * 100})
    assert "together with the input of each" in answer.error["message"]


def test_a_model_for_vectors_says_so(server: Served) -> None:
    server.llm.pooling = PoolingConfig(size=256)
    answer = ask(server.url, PATH, {"input": "hi", "questions": [PREDICATE]})
    assert (answer.status, answer.error["code"]) == (400, "unsupported_task")


def test_labels_have_to_be_one_token_each() -> None:
    class Words(Tokenizer):
        """Whatever stands between spaces is one token: a label joins the word before it."""

        def __init__(self) -> None:
            self.words = ["a:"]

        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return " ".join(self.words[each] for each in token_ids)

        def encode(self, text: str, add_special_tokens: bool = True, cuts: Any = ()) -> list[int]:
            self.words += [each for each in text.split() if each not in self.words]
            return [self.words.index(each) for each in text.split()]

    with pytest.raises(InvalidRequest, match="no token for A"):
        label_tokens(Words(), Prompt(token_ids=[0]), 2)
