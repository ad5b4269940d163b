"""`/infill` answers as llama.cpp's server does, for editors that ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.outputs import RequestMetrics
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.server.conftest import Served
from tests.server.fake_llm import MAX_MODEL_LEN
from tests.server.raw import ask, events

NAMES = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(259, 264)
TEXTS = {"input_prefix": "a\n", "input_suffix": "\nb", "prompt": "c"}
IDS = [PREFIX, *b"a\nc", SUFFIX, *b"\nb", MIDDLE]


@pytest.fixture
def filling(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server whose model has the tokens to fill in."""
    listed = {str(PREFIX + at): {"content": name, "special": True} for at, name in enumerate(NAMES)}
    monkeypatch.setattr(server.llm, "tokenizer", byte_tokenizer(tmp_path, added_tokens_decoder=listed))
    server.llm.metrics_of_request = RequestMetrics(
        arrival_time=0.0, first_scheduled_time=1.0, first_token_time=1.5, last_token_time=2.5
    )
    return server


def infill(served: Served, **fields: Any) -> Any:
    answer = ask(served.url, "/infill", {**TEXTS, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def test_text_between_prefix_and_suffix_is_returned_in_the_format_of_llama_cpp(filling: Served) -> None:
    answer = infill(filling, n_predict=6, return_tokens=True)
    timings = answer.pop("timings")
    assert answer == {
        "index": 0,
        "content": "Blocks",
        "tokens": [*b"Blocks"],
        "stop": True,
        "model": "letters",
        "tokens_predicted": 6,
        "tokens_evaluated": len(IDS),
        "tokens_cached": len(IDS) // 2,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
    }
    assert (timings["predicted_n"], timings["prompt_ms"], timings["predicted_per_second"]) == (6, 500.0, 5.0)
    [(_, prompt, params, _)] = filling.llm.requests
    assert (prompt.token_ids, params.max_tokens, params.stop_token_ids) == (IDS, 6, (REPOSITORY, FILE))


def test_completion_with_a_suffix_ends_where_infill_does(filling: Served) -> None:
    for given in ({}, {"stop_token_ids": [7]}):
        answer = ask(filling.url, "/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 6, **given})
        assert answer.status == 200, answer.body
    assert [each[2].stop_token_ids for each in filling.llm.requests] == [(REPOSITORY, FILE), (7, REPOSITORY, FILE)]
    ask(filling.url, "/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 6})
    assert filling.llm.requests[-1][2].stop_token_ids == ()


def test_other_files_stand_first_and_those_without_room_are_left_out(filling: Served) -> None:
    files = [{"filename": "x", "text": "long" * 100}, {"text": "y", "time": [1, 2]}]
    infill(filling, input_extra=files, n_predict=1)
    [(_, prompt, _, _)] = filling.llm.requests
    assert prompt.token_ids == [REPOSITORY, *b"myproject\n", FILE, *b"tmp\ny", FILE, *b"filename\n", *IDS]


def test_request_of_an_editor_is_answered_with_the_fields_that_it_picks(filling: Served) -> None:
    picked = ["content", "timings/predicted_n", "timings/truncated", "truncated"]
    editor = {"id_slot": 0, "n_indent": 4, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True}
    editor |= {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "stop": [], "top_k": 40, "top_p": 0.9}
    answer = infill(filling, **editor, n_predict=2, response_fields=picked)
    assert answer == {"content": "Bl", "timings/predicted_n": 2, "truncated": False}
    assert infill(filling, n_predict=0, response_fields=[""]) == {}
    warmed = infill(filling, n_predict=0)
    assert (warmed["content"], warmed["tokens"], warmed["tokens_predicted"]) == ("", [], 0)


def test_text_that_is_surely_too_long_is_not_tokenised(filling: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a" * (100 * MAX_MODEL_LEN + 1)
    monkeypatch.setattr("octavo.engine.text.fill_in._plain_ids", None)
    for path, asked in (("/infill", TEXTS), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        for field in set(asked) & {"input_prefix", "input_suffix", "prompt", "suffix"}:
            answer = ask(filling.url, path, {**asked, field: long})
            named = "input_prefix" if path == "/infill" and field == "prompt" else field
            assert (answer.status, answer.error["param"]) == (400, named)
            assert answer.error["code"] == "context_length_exceeded"


def test_several_texts_are_an_array_and_a_text_without_limit_goes_on_to_the_end(filling: Served) -> None:
    filling.llm.sentence = "ends."
    answer = infill(filling, n_predict=-1, n_cmpl=2, repeat_penalty=1.5)
    assert [(each["index"], each["content"], each["stop_type"]) for each in answer] == [
        (0, "ends.", "eos"),
        (1, "ends.", "eos"),
    ]
    [(_, _, params, _)] = filling.llm.requests
    assert (params.max_tokens, params.n, params.repetition_penalty) == (None, 2, 1.5)


def test_stream_has_pieces_and_a_last_chunk_with_the_counts(filling: Served) -> None:
    *pieces, last = events(ask(filling.url, "/infill", {**TEXTS, "n_predict": 3, "stream": True}).body)
    assert pieces == [
        {"index": 0, "content": letter, "tokens": [ord(letter)], "stop": False} for letter in ("B", "l", "o")
    ]
    assert (last["content"], last["stop"], last["tokens_predicted"], last["stop_type"]) == ("", True, 3, "limit")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input_suffix": None}, "input_suffix", "invalid_type"),
        ({"n_cmpl": 0}, "n_cmpl", "invalid_value"),
        ({"repeat_penalty": -1}, "repeat_penalty", "invalid_value"),
        ({"n_predict": 1000}, "n_predict", "context_length_exceeded"),
        ({"n_probs": 2}, "n_probs", "unsupported_parameter"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text", "missing_required_parameter"),
    ],
)
def test_refusal_names_the_field_of_the_editor(filling: Served, fields: dict[str, Any], param: str, code: str) -> None:
    answer = ask(filling.url, "/infill", {**TEXTS, **fields})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)


def test_model_that_was_not_trained_to_fill_in_is_refused_by_the_suffix(
    filling: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling.llm, "tokenizer", byte_tokenizer(tmp_path / "plain"))
    error = ask(filling.url, "/infill", TEXTS).error
    assert (error["param"], error["code"]) == ("input_suffix", "unsupported_parameter")
    assert error["message"].startswith("input_suffix cannot be used")
