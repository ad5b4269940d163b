"""`/v1/audio/transcriptions` and `/v1/audio/translations` over a tiny Whisper, through the openai client."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
import soundfile

from octavo.core.speech import SpeechTokens
from tests.fakes.warm_server import WarmServer
from tests.fakes.whisper import RATE, make_whisper, tone
from tests.server.conftest import Served
from tests.server.raw import ask


def wav(seconds: float, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, tone(seconds, rate=rate), rate, format="WAV")
    return file.getvalue()


LETTERS = SpeechTokens(
    start=990, end=980, no_timestamps=999, languages={"en": ord("B"), "fr": 901},
    tasks={"transcribe": 910, "translate": 911}, previous=920,
)  # fmt: skip
"""Of the fake engine, whose first letter is a language."""


@pytest.fixture
def hearing(server: Served, tmp_path: Path) -> Iterator[Served]:
    """The fake engine as a model that hears a second at once."""
    (tmp_path / "config.json").write_text('{"max_source_positions": 50, "num_mel_bins": 8}')
    (tmp_path / "preprocessor_config.json").write_text('{"feature_size": 8}')
    model = dataclasses.replace(server.llm.config.model, speech=LETTERS, path=str(tmp_path))
    before, server.llm.config = server.llm.config, msgspec.structs.replace(server.llm.config, model=model)
    yield server
    server.llm.config = before


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., WarmServer]) -> Iterator[str]:
    """`octavo serve` with a tiny Whisper."""
    path = make_whisper(tmp_path_factory.mktemp("whisper"))
    server = serve(path, "--dtype", "float32", "--served-model-name", "whisper")
    yield server.url
    assert server.stop() == 0


def client_of(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).audio


def test_windows_follow_each_other_and_the_text_is_theirs(hearing: Served) -> None:
    found = client_of(hearing.url).transcriptions.create(
        model="letters", file=("a.wav", wav(1.9, 22_050)), response_format="verbose_json", temperature=0.5, prompt="Hi"
    )
    assert [(each.start, each.end, each.text[:6]) for each in found.segments] == [(0, 1, "Blocks"), (1, 1.9, "Blocks")]
    assert (found.task, found.language, found.duration, found.usage.seconds) == ("transcribe", "en", 1.9, 1.9)
    prompts = [(prompt.token_ids, params.temperature) for _, prompt, params, _ in hearing.llm.requests]
    first, second = ([990, 998], 0.0), ([990], 0.0)
    text = [990, 66, 910]
    before = [920, ord(" "), ord("H"), ord("i")]
    assert prompts == [first, second, (before + text, 0.5), first, (text, 0.5)]
    client_of(hearing.url).transcriptions.create(
        model="letters", file=("a.wav", wav(1.9)), temperature=0.5, prompt="Hi", extra_body={"hotwords": "Ag"}
    )
    asked = [prompt.token_ids for _, prompt, params, _ in hearing.llm.requests[5:] if params.temperature]
    words = [920, ord(" "), ord("A"), ord("g")]
    assert asked == [words + before[1:] + text, words + text]
    del hearing.llm.requests[5:]
    assert len({prompt.media[0].digest for _, prompt, _, _ in hearing.llm.requests}) == 2


def test_a_window_has_at_most_the_tokens_that_are_asked_for(hearing: Served) -> None:
    client_of(hearing.url).transcriptions.create(
        model="letters", file=("a.wav", wav(0.5)), language="fr", extra_body={"max_completion_tokens": "3"}
    )
    limits = [params.max_tokens for _, _, params, _ in hearing.llm.requests if params.prompt_logprobs is None]
    assert set(limits) == {3}


def test_every_format_is_there(hearing: Served) -> None:
    create = client_of(hearing.url).transcriptions.create
    common: Any = {"model": "letters", "file": ("a.wav", wav(0.5)), "language": "fr", "temperature": 1.0}
    text = create(**common).text
    assert text.startswith("Blocks are pages")
    assert create(response_format="text", **common) == f"{text}\n"
    assert create(response_format="srt", **common).startswith("1\n00:00:00,000 --> 00:00:00,500\nBlocks")
    assert create(response_format="vtt", **common).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nBlocks")
    delta, done = create(stream=True, **common)
    assert (delta.type, done.type, done.text) == ("transcript.text.delta", "transcript.text.done", text)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert delta.choices[0]["delta"] == {"content": delta.delta}
    assert [each.choices[0]["finish_reason"] for each in (delta, done)] == [None, "stop"]
    counts = create(stream=True, extra_body={"stream_include_usage": "true"}, **common)
    *others, totals = [each.to_dict() for each in counts]
    assert [each.get("choices") for each in others] == [each.to_dict()["choices"] for each in (delta, done)]
    assert totals["choices"] == []
    assert "usage" not in others[0]
    both = {"stream_include_usage": "true", "stream_continuous_usage_stats": "true"}
    first, *_, last = [each.to_dict() for each in create(stream=True, extra_body=both, **common)]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    spoken = done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens
    assert first["usage"] == last["usage"] == totals["usage"] == dict(zip(names, spoken, strict=True))
    with pytest.warns(DeprecationWarning, match="deprecated"):  # by the client
        found = client_of(hearing.url).translations.create(model="letters", file=("a.wav", wav(0.2)))
    assert found.text.startswith("Blocks are pages")


@pytest.mark.long
def test_the_shipped_path_writes_down_a_sound(url: str) -> None:
    create = client_of(url).transcriptions.create
    common: Any = {
        "model": "whisper",
        "file": ("a.wav", wav(1.9, 22_050)),
        "language": "en",
        "temperature": 0.01,
        "extra_body": {"seed": 1},
    }
    verbose = create(response_format="verbose_json", timestamp_granularities=["segment"], **common)
    assert (verbose.task, verbose.language, verbose.duration) == ("transcribe", "en", 1.9)
    assert verbose.usage.seconds == 1.9
    assert verbose.text == "".join(each.text for each in verbose.segments).strip()
    starts = [each.start for each in verbose.segments]
    assert starts == sorted(starts)
    assert all(0 <= each.start <= each.end <= 2.0 and each.temperature == 0.01 for each in verbose.segments)
    assert create(**common).text == verbose.text
    assert create(response_format="text", **common) == f"{verbose.text}\n"
    assert create(response_format="srt", **common).count(" --> ") == len(verbose.segments)
    assert create(response_format="vtt", **common).startswith("WEBVTT\n\n00:00:")
    events = list(create(stream=True, **common))
    assert [each.type for each in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert "".join(each.delta for each in events[:-1]).strip() == events[-1].text == verbose.text
    assert events[-1].usage.total_tokens == events[-1].usage.input_tokens + events[-1].usage.output_tokens


VERBOSE = {"response_format": "verbose_json"}
REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "word": ({**VERBOSE, "timestamp_granularities": ["word"]}, "timestamp_granularities", "single words"),
    "json": ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "needs response_format"),
    "stream": ({"stream": True, "response_format": "srt"}, "response_format", "expected json or text"),
    "language": ({"language": "xx"}, "language", "expected one of en, fr"),
    "temperature": ({"temperature": -1.0}, "temperature", "temperature"),
    "format": ({"response_format": "xml"}, "response_format", "is not one of json, srt, text"),
    "field": ({"extra_body": {"wrong": "1"}}, "wrong", "wrong is not a known field"),
    "usage": ({"extra_body": {"stream_include_usage": "true"}}, "stream_include_usage", "stream is false"),
    "target": ({"extra_body": {"to_language": "de"}}, "to_language", "send it to /v1/audio/translations"),
    "beams": ({"extra_body": {"use_beam_search": "true"}}, "use_beam_search", "without beam search"),
    "tokens": ({"extra_body": {"max_completion_tokens": "0"}}, "max_completion_tokens", "`int` >= 1"),
    "include": ({"include": ["logprobs"]}, "include", "include is not supported"),
    "model": ({"model": "other"}, "model", "other"),
    "no sound": ({"file": ("a.wav", b"RIFF")}, "file", "no sound that can be decoded"),
    "rate": ({"file": ("a.wav", wav(0.1)[:24] + b"\x01\x00\x00\x00" + wav(0.1)[28:])}, "file", "1 samples per second"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "param", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_requests_are_named(changes: dict[str, Any], param: str | None, message: str, hearing: Served) -> None:
    create = client_of(hearing.url).transcriptions.create
    with pytest.raises(openai.APIStatusError) as error:
        create(**{"model": "letters", "file": ("a.wav", wav(0.2))} | changes)
    body: Any = error.value.body
    assert error.value.status_code in (400, 404)
    assert body["param"] == param
    assert message in body["message"]


def test_other_bodies_and_pages_of_other_origins_are_refused(hearing: Served) -> None:
    url = hearing.url
    answer = ask(url, "/v1/audio/transcriptions", {"model": "letters"})
    assert (answer.status, answer.json["error"]["code"]) == (415, "invalid_content_type")
    files = {"file": ("a.wav", wav(0.1))}
    foreign = httpx2.post(f"{url}/v1/audio/transcriptions", files=files, headers={"Origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert httpx2.post(f"{url}/v1/completions", files=files).status_code == 415
    paths = json.loads(ask(url, "/openapi.json").body)["paths"]
    assert "multipart/form-data" in paths["/v1/audio/translations"]["post"]["requestBody"]["content"]


def test_a_model_of_text_hears_nothing(server: Served) -> None:
    answer = httpx2.post(f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", wav(0.1))})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")


def test_of_a_long_text_before_a_sound_the_end_alone_is_tokenised(
    hearing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, lengths = hearing.llm.tokenizer, list[int]()
    encode = tokenizer.encode

    def counting(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counting)
    client_of(hearing.url).transcriptions.create(
        model="letters", file=("a.wav", wav(0.5)), prompt="H" * 500_000, temperature=0.5
    )
    assert 0 < max(lengths) < 20_000
