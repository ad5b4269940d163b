"""Sounds that a model writes down in prompts: over the fake engine, with the prompts of a Qwen3-ASR."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import numpy as np
import pytest
import soundfile
from tokenizers import Tokenizer

from octavo.engine.input.input_processor import InputProcessor, InputSetup
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.tokenizer import Tokenizer as OctavoTokenizer
from octavo.errors import InvalidRequest
from octavo.server.schema.audio import TranscriptionRequest
from octavo.server.speech import speech_prompts
from octavo.server.speech.speech_prompts import Asked, Task, gap, style_of
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.core import core_ready, engine_config
from tests.fakes.hearing import FAMILIES
from tests.fakes.whisper import RATE, tone
from tests.server.conftest import Served

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}"
    "{{ '<audio>' if part.type == 'audio' else part.text }}{% endfor %}{% endfor %}<assistant>"
)


def inputs(path: Path, family: str = "qwen3_asr", max_model_len: int = 4096) -> InputProcessor:
    write_byte_tokenizer(path, chat_template=TEMPLATE)
    file = str(path / "tokenizer.json")
    backend = Tokenizer.from_file(file)
    backend.add_special_tokens(["<audio>"])
    backend.add_tokens(["<asr_text>"])
    backend.save(file)
    make, architecture = FAMILIES[family]
    config, processor = make()
    values = config.to_dict() | {"architectures": [architecture], "audio_token_id": backend.token_to_id("<audio>")}
    values.pop("audio_token_index", None)
    (path / "config.json").write_text(json.dumps(values, default=str))
    (path / "processor_config.json").write_text(json.dumps({"feature_extractor": processor.to_dict()}, default=str))
    ready = core_ready(max_model_len=max_model_len, vocab_size=300)
    tokenizer = OctavoTokenizer.open(path)
    setup = InputSetup(engine_config(str(path)).model, ready, max_num_seqs=4)
    return InputProcessor(setup, tokenizer=tokenizer, chat_template=ChatTemplate.find(path, tokenizer))


def test_the_task_follows_the_sound(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "input", tools := inputs(tmp_path, "granite_speech"))
    for task, words in (
        ("transcriptions", "can you transcribe the speech into a written format?"),
        ("translations", "translate the speech to English"),
    ):
        assert post(server.url, tone(0.5), task).status_code == 200
        audio = [tools.tokenizer.token_id("<audio>")] * 6
        expected = [*tools.tokenizer.encode("<user>"), *audio, *tools.tokenizer.encode(f"{words}<assistant>")]
        assert server.llm.requests[-1][1].token_ids == expected
    assert post(server.url, tone(0.5), "translations", to_language="DE").status_code == 200
    text = tools.tokenizer.decode(server.llm.requests[-1][1].token_ids, False)
    assert text.endswith("translate the speech to German<assistant>")
    for field, value in (("hotwords", "Ag"), ("to_language", "xx")):
        assert post(server.url, tone(0.5), "translations", **{field: value}).json()["error"]["param"] == field
    monkeypatch.setattr(server.llm, "input", tools := inputs(tmp_path, "glmasr"))
    assert post(server.url, tone(0.5)).status_code == 200
    text = tools.tokenizer.decode(server.llm.requests[-1][1].token_ids, False)
    assert text == f"<user>{'<audio>' * 6}Please transcribe this audio into text<assistant>"
    refused = post(server.url, tone(0.5), language="en").json()["error"]
    assert (refused["param"], "leave it out" in refused["message"]) == ("language", True)


def test_fun_asr_is_asked_in_its_own_words() -> None:
    write = speech_prompts.STYLES["fun_asr"].prompt
    sounds, tokenizer = SimpleNamespace(marker=7), SimpleNamespace(token_text=lambda token: f"<{token}>")
    tools: Any = SimpleNamespace(media=SimpleNamespace(sounds=sounds), tokenizer=tokenizer)

    def asked(**form: str) -> str:
        prompt = write(tools, Asked(TranscriptionRequest(**form), "transcribe", (tone(0.1), RATE)))
        assert prompt.multi_modal_data is not None
        return (prompt.text or "").partition("user\n")[2].partition("<|im_end|>")[0]

    assert asked() == "\u8bed\u97f3\u8f6c\u5199\uff1a<7>"
    assert asked(language="EN") == "\u8bed\u97f3\u8f6c\u5199\u6210\u82f1\u6587\uff1a<7>"
    assert "[octavo, vLLM]" in asked(hotwords="octavo, vLLM")
    for field, value in (("prompt", "x"), ("language", "de"), ("hotwords", "<|im_end|>")):
        with pytest.raises(InvalidRequest, match=field):
            asked(**{field: value})


def test_a_model_that_repeats_itself_is_stopped_where_the_context_has_room(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm, "input", inputs(tmp_path, "granite_speech"))
    style = speech_prompts.STYLES["granite"]._replace(tokens_per_s=20.0)
    monkeypatch.setitem(cast("dict[str, Any]", speech_prompts.STYLES), "granite", style)
    for seconds in (1.5, 10.0):
        assert post(server.url, tone(seconds)).status_code == 200
    assert [params.max_tokens for _, _, params, _ in server.llm.requests[-2:]] == [31, None]


@pytest.fixture
def asking(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The fake engine, which answers to prompts as they are written for Qwen3-ASR."""
    monkeypatch.setattr(server.llm, "sentence", "language German<asr_text> Hallo")
    monkeypatch.setattr(server.llm, "input", inputs(tmp_path))
    return server


def post(url: str, sound: Any, task: str = "transcriptions", **fields: str) -> Any:
    file = io.BytesIO()
    soundfile.write(file, sound, RATE, format="WAV")
    files = {"file": ("a.wav", file.getvalue())}
    return httpx2.post(f"{url}/v1/audio/{task}", files=files, data={"model": "letters", **fields})


def test_the_language_that_the_model_writes_is_left_out(asking: Served) -> None:
    for stream in (False, True):
        response = post(asking.url, tone(1.3), stream=str(stream).lower())
        last = response.text.strip().split("\n\n")[-2].removeprefix("data: ") if stream else response.text
        assert json.loads(last)["text"] == "Hallo", response.text
    assert response.text.count("transcript.text.delta") == len("Hallo")
    (_, prompt, params, _) = asking.llm.requests[0]
    audio, tokenizer = asking.llm.input.tokenizer.token_id("<audio>"), asking.llm.input.tokenizer
    assert prompt.token_ids == [*tokenizer.encode("<user>"), *[audio] * 17, *tokenizer.encode("<assistant>")]
    assert (params.temperature, [each.num_embeddings for each in prompt.media]) == (0.0, [13, 4])


def test_language_and_text_of_the_request_are_in_the_prompt(asking: Served) -> None:
    post(asking.url, tone(0.5), language="DE", prompt="Welt <audio>")
    token_ids = asking.llm.requests[0][1].token_ids
    audio, tokenizer = asking.llm.input.tokenizer.token_id("<audio>"), asking.llm.input.tokenizer
    first = token_ids.index(audio)
    assert tokenizer.decode(token_ids[:first], False) == "<system>Welt <audio><user>", "spelt, and no token"
    assert tokenizer.decode(token_ids[first + 7 :], False) == "<assistant>language German<asr_text>"
    post(asking.url, tone(0.5), hotwords="Hallo", prompt="Welt")
    token_ids = asking.llm.requests[1][1].token_ids
    assert tokenizer.decode(token_ids[: token_ids.index(audio)], False) == "<system>Hallo Welt<user>"
    refused = post(asking.url, tone(0.5), language="xx").json()["error"]
    assert (refused["param"], "expected one of ar, cs," in refused["message"]) == ("language", True)
    assert post(asking.url, tone(0.5), "translations").json()["error"]["code"] == "unsupported_task"


def test_a_sound_of_which_nothing_is_heard_is_refused_by_the_name_of_the_file(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.llm, "input", inputs(tmp_path, "glmasr"))
    refused = post(server.url, tone(0.01)).json()["error"]
    assert (refused["param"], refused["message"]) == ("file", "file lasts 0.010 s, expected at least 0.03 s")


def test_long_sounds_are_written_down_in_pieces(
    asking: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking.llm, "input", inputs(tmp_path, max_model_len=64))  # two seconds, and what is said there
    sound = np.concatenate([tone(1.6), np.zeros(RATE // 5, np.float32), tone(1.0)])
    found = post(asking.url, sound, response_format="verbose_json").json()
    pieces = [(each["start"], each["end"], each["text"]) for each in found["segments"]]
    assert pieces == [(0.0, 1.65, "Hallo"), (1.65, 2.8, " Hallo")], "cut in the silence"
    assert (found["text"], found["language"], found["duration"]) == ("Hallo Hallo", "de", 2.8)
    assert post(asking.url, sound).json()["text"] == "Hallo Hallo"
    assert '"text":"Hallo Hallo"' in post(asking.url, sound, stream="true").text
    srt = post(asking.url, sound, response_format="srt").text
    assert srt.startswith("1\n00:00:00,000 --> 00:00:01,650\nHallo\n\n2\n00:00:01,650 --> ")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("language En", None),
        ("language English<asr_text>Hi", ("en", "Hi")),
        ("language None<asr_text>", (None, "")),
        ("A text without a language, which comes at once and goes on", (None,)),
    ],
)
def test_what_stands_before_a_text(written: str, found: Any, tmp_path: Path) -> None:
    style = style_of(inputs(tmp_path))
    assert style is not None
    assert style.split(written) == ((None, written) if found == (None,) else found)


def test_scripts_without_spaces_get_none_between_pieces() -> None:
    assert [gap(*each) for each in (("a", "b"), ("", "b"), ("你", "好"), ("가", "나"))] == [" ", "", "", " "]


@pytest.mark.parametrize(
    ("task", "language", "words"),
    [
        ("transcribe", None, "Transcribe this audio."),
        ("transcribe", "DE", "Transcribe this audio into German."),
        ("translate", "fr", "Translate this audio from French into English."),
        ("translate", None, "Translate this audio into English."),
    ],
)
def test_models_of_all_kinds_are_asked_in_words(task: Task, language: str | None, words: str) -> None:
    sounds = SimpleNamespace(architecture="Qwen3OmniMoeForConditionalGeneration")
    tools: Any = SimpleNamespace(media=SimpleNamespace(hearing=sounds), render_chat=lambda messages: messages)
    style = style_of(tools)
    assert style is not None
    assert task in style.tasks
    sound = (tone(0.1), RATE)
    [message] = cast(Any, style.prompt(tools, Asked(TranscriptionRequest(language=language), task, sound)))
    assert message["content"] == [{"type": "audio", "audio": sound}, {"type": "text", "text": words}]
    with pytest.raises(InvalidRequest, match="prompt is set"):
        style.prompt(tools, Asked(TranscriptionRequest(prompt="x"), task, sound))


@pytest.mark.parametrize("architecture", ["Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"])
def test_phi_is_asked_in_the_words_of_its_card(architecture: str) -> None:
    sounds = SimpleNamespace(architecture=architecture)
    tools: Any = SimpleNamespace(media=SimpleNamespace(hearing=sounds), render_chat=lambda messages: messages)
    style, sound = style_of(tools), (tone(0.1), RATE)
    assert style is not None
    words: dict[Task, str] = {
        "transcribe": "Transcribe the audio clip into text.",
        "translate": "Translate the audio to English.",
    }
    assert (style.tasks, style.piece_s) == (set(words), 40.0)
    for task, asked in words.items():
        [message] = cast(Any, style.prompt(tools, Asked(TranscriptionRequest(), task, sound)))
        assert message["content"] == [{"type": "audio", "audio": sound}, {"type": "text", "text": asked}]
    for field in ("prompt", "language"):
        with pytest.raises(InvalidRequest, match=f"{field} is set"):
            style.prompt(tools, Asked(TranscriptionRequest(**{field: "en"}), "transcribe", sound))
