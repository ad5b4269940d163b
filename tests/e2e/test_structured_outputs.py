"""Structured outputs of octavo-tiny: of their form, and the same whatever runs beside, is preempted, or compiles."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.outputs import RequestOutput
from octavo.errors import InvalidRequest
from octavo.structured_output.matchers import Matchers

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "owl"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "names": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["animal", "age", "names"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": r"[0-9]{3}-[a-z]{4}"},
    {"choice": ["yes", "no", "may be"]},
    {"grammar": 'start: "a" WORD "z"\nWORD: /[b-y]{2,5}/'},
]
PROMPT = "Tell me about a cat as JSON. "


def requests() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "n": 2, "logprobs": 2},
        {"temperature": 1.0, "repetition_penalty": 1.1},
        {"temperature": 0, "use_beam_search": True, "n": 2},
    ]
    return [
        SamplingParams(max_tokens=120, seed=place, structured_outputs=form, **kind)
        for place, form in enumerate(FORMS)
        for kind in kinds
    ]


def drawn(output: RequestOutput) -> list[Any]:
    return [(each.token_ids, each.cumulative_logprob, each.finish_reason) for each in output.outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[Any]]:
    return [drawn(llm.generate([PROMPT], each, use_tqdm=False)[0]) for each in requests()]


def test_every_text_is_of_its_form(llm: LLM) -> None:
    for output, params in zip(
        llm.generate([PROMPT] * len(requests()), requests(), use_tqdm=False), requests(), strict=True
    ):
        form = params.structured_outputs
        assert form is not None
        for each in output.outputs:
            assert each.finish_reason == "stop"
            if form.form == "json":
                found = json.loads(each.text)
                assert set(found) == {"animal", "age", "names"}
                assert 0 <= found["age"] <= 30
            elif form.form == "choice":
                assert each.text in form.choice
            else:
                assert len(each.text) in range(4, 9)


def test_texts_are_the_same_beside_others(llm: LLM, alone: list[list[Any]]) -> None:
    others = [SamplingParams(max_tokens=40, seed=9, temperature=1.0)] * 4
    together = llm.generate([PROMPT] * (len(alone) + 4), [*others, *requests()], use_tqdm=False)
    assert [drawn(output) for output in together[4:]] == alone


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_texts_are_the_same_when_blocks_are_few(llm: LLM, mode: str) -> None:
    params = SamplingParams(max_tokens=60, seed=1, temperature=1.2, n=2, structured_outputs={"json": SCHEMA})
    prompts = [f"Story number {number} is about a cat. As JSON it is: " for number in range(6)]
    expected = [drawn(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in prompts]
    settings: dict[str, Any] = {"preemption_mode": mode, "num_gpu_blocks_override": 14, "watermark": 0.0}
    with LLM(threads=1, max_model_len=96, swap_space=0.01, **settings) as small:
        together = small.generate(prompts, params, use_tqdm=False)
        assert small.engine.core.stats().num_preemptions > 0
    assert [drawn(output) for output in together] == expected


def test_texts_are_the_same_over_ranks(alone: list[list[Any]]) -> None:
    with LLM(threads=1, tensor_parallel_size=2) as ranks:
        together = ranks.generate([PROMPT] * len(alone), requests(), use_tqdm=False)
    assert [drawn(output) for output in together] == alone


def test_a_grammar_that_compiles_for_long_delays_its_own_request_alone(
    alone: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    compile_ = Matchers._compile

    def slowly(self: Matchers, *params: Any) -> Any:
        assert may_go_on.wait(60)
        return compile_(self, *params)

    monkeypatch.setattr(Matchers, "_compile", slowly)
    with LLM(threads=1) as llm:
        engine = llm.engine
        guided = requests()[1]
        engine.add_request("guided", PROMPT, guided)
        engine.add_request("plain", PROMPT, SamplingParams(max_tokens=20, temperature=0))
        finished: list[RequestOutput] = []
        while not finished:
            finished += [output for output in engine.step() if output.finished]
        assert [output.request_id for output in finished] == ["plain"]
        may_go_on.set()
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
    assert drawn(finished[-1]) == alone[1]


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"json": {"uniqueItems": True}})
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llm.engine.add_request("refused", PROMPT, params)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.error is not None
    assert "uniqueItems" in output.error.message


@pytest.mark.parametrize("form", [{"grammar": "start: start"}, {"json": {"$ref": "#"}}], ids=str)
def test_a_grammar_of_no_text_is_said_to_be_one(llm: LLM, form: dict[str, Any]) -> None:
    [output] = llm.generate([PROMPT], SamplingParams(structured_outputs=form), use_tqdm=False)
    assert output.error is not None
    assert output.error.message.endswith("allows no text here: a rule that only refers to itself has no end; change it")


def test_a_form_that_ends_before_min_tokens_is_named_in_the_error(llm: LLM) -> None:
    params = SamplingParams(min_tokens=15, structured_outputs={"choice": ["yes", "no"]})
    error = llm.generate(PROMPT, params)[0].error
    assert error is not None
    assert error.message.endswith("min_tokens and structured_outputs bar every token; loosen one of them")
    assert error.field == "min_tokens"
