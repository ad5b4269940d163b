"""A tiny Voxtral over HTTP, with its own kind of tokenizer: it writes sounds down, and reads them in chats."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from octavo import LLM, SamplingParams
from tests.fakes.hearing import make_voxtral
from tests.fakes.tekken import NUM_SPECIAL, SPECIAL
from tests.fakes.warm_server import WarmServer
from tests.server.raw import ask
from tests.server.routes.test_audio import wav

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_voxtral(tmp_path_factory.mktemp("voxtral"))


@pytest.fixture(scope="module")
def url(path: Path, serve: Callable[..., WarmServer]) -> Iterator[str]:
    options = ("--served-model-name", "voxtral", "--max-model-len", "200", "--max-features-size", "144KiB")
    server = serve(path, "--dtype", "float32", *options)
    yield server.url
    assert server.stop() == 0


@pytest.fixture(scope="module")
def expected(path: Path) -> list[str]:
    """What the model writes to three prompts: in its language, in English, and of a chat."""
    before = [SPECIAL.index(each) for each in ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]")]
    end, mark = SPECIAL.index("[/INST]"), SPECIAL.index("[TRANSCRIBE]")
    language = [NUM_SPECIAL + byte for byte in b"lang:en"]
    audio = {"audio": wav(2.5)}
    prompts = [
        {"prompt_token_ids": [*before, *behind], "multi_modal_data": audio}
        for behind in ([end, mark], [end, *language, mark], [NUM_SPECIAL + ord("?"), end])
    ]
    with LLM(str(path), dtype="float32", max_model_len=200, num_gpu_blocks_override=64) as llm:
        written = SamplingParams(temperature=0.0, max_tokens=None)
        params = [written, written, SamplingParams(max_tokens=9, seed=3)]
        return [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_a_sound_is_written_down_in_one_prompt(url: str, expected: list[str]) -> None:
    create = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).audio.transcriptions.create
    common: Any = {"model": "voxtral", "file": ("a.wav", wav(2.5))}
    found = create(**common)
    assert (found.text, found.usage.seconds) == (expected[0].strip(), 2.5)
    assert create(**common, language="en", response_format="text") == f"{expected[1].strip()}\n"
    *deltas, done = create(**common, stream=True)
    assert len(deltas) > 1
    assert "".join(each.delta for each in deltas).strip() == done.text == found.text
    assert done.usage.input_tokens == 3 + 50 + 2, "two windows of 25 vectors between the marks"
    assert done.usage.output_tokens == 200 - done.usage.input_tokens, "what the context has room for"
    timed = create(**common | {"file": ("a.wav", wav(17.0))}, response_format="verbose_json")
    assert [each.end - each.start <= 10 for each in timed.segments] == [True] * 2, "70 % of the windows that fit"
    assert create(**common, temperature=1.0, extra_body={"seed": 1}).text != found.text


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "prompt": ({"prompt": "Hello"}, "prompt", "this model reads no text before a sound"),
    "language": ({"language": "english"}, "language", "expected a code of two letters"),
    "no sound": ({"file": ("a.wav", b"RIFF")}, "file", "no sound that can be decoded"),
}


@pytest.mark.parametrize(("changes", "param", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_model_cannot_do_is_refused_by_name(
    changes: dict[str, Any], param: str | None, message: str, url: str
) -> None:
    create = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).audio.transcriptions.create
    with pytest.raises(openai.BadRequestError) as error:
        create(**{"model": "voxtral", "file": ("a.wav", wav(0.2))} | changes)
    body: Any = error.value.body
    assert (body["param"], message in body["message"]) == (param, True), body
    answer = httpx2.post(f"{url}/v1/audio/translations", files={"file": ("a.wav", wav(0.1))})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")


def test_features_beyond_their_room_are_refused(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav(21.0))})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large"), answer.text


def test_a_chat_has_sounds_by_the_template_of_the_tokenizer(url: str, expected: list[str]) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(2.5)).decode(), "format": "wav"}}
    messages = [{"role": "user", "content": [sound, {"type": "text", "text": "?"}]}]
    answer = ask(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 9, "seed": 3})
    assert answer.status == 200, answer.content
    assert answer.json["choices"][0]["message"]["content"] == expected[2]
    assert answer.json["usage"]["prompt_tokens"] == 3 + 50 + 2
