"""Models from disk to the answers of a server, with images and sounds that clients really send."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import openai
import pytest
from PIL import Image

from octavo import LLM, SamplingParams
from tests.fakes.hearing import make_hearing_checkpoint
from tests.fakes.phi4 import as_released as released_phi4
from tests.fakes.vision import image, make_vision_checkpoint
from tests.fakes.warm_server import WarmServer
from tests.models.test_released_ernie import as_released as released_ernie
from tests.models.test_released_kimi import as_released
from tests.models.test_released_nemotron import as_released as released_nemotron
from tests.server.raw import ask
from tests.server.routes.test_audio import wav

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else '<img>' if part.type == 'audio' else part.text }} "
    "{% endfor %}{% endif %}{% endfor %}"
)
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 400, "num_gpu_blocks_override": 96}
SETTINGS = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5}
WORD = {"type": "text", "text": "w1"}


class Running(NamedTuple):
    """A server, the folder of its model, and the word that stands for a sound; empty where it hears none."""

    url: str
    path: Path
    sound: str

    def chat(self, *parts: Any, **settings: Any) -> Any:
        body = {"messages": [{"role": "user", "content": [WORD, *parts]}], **SETTINGS, **settings}
        return ask(self.url, "/v1/chat/completions", body)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "gemma4_unified": lambda path: make_hearing_checkpoint("gemma4_unified", path),
    "kimi_vl": lambda path: as_released(make_vision_checkpoint("kimi_k25", path)),
    "ernie4_5_vl": lambda path: released_ernie(make_vision_checkpoint("ernie4_5_vl", path)),
    "minimax_m3": lambda path: make_vision_checkpoint("minimax_m3", path),
    "nemotron_omni": lambda path: released_nemotron(make_vision_checkpoint("nemotron_omni", path)),
    "muse_glimmer": lambda path: make_vision_checkpoint("muse_glimmer", path),
    "phi4_multimodal": lambda path: released_phi4(make_vision_checkpoint("phi4_multimodal", path)),
}


SOUNDS = {"gemma4_unified": "<img>", "phi4_multimodal": "<video>"}
FIRST = ("gemma4_unified",)


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=[pytest.mark.long] * (each not in FIRST)) for each in MAKERS]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., WarmServer]
) -> Iterator[Running]:
    path = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    config = path / "tokenizer_config.json"
    template = TEMPLATE.replace("<img>", SOUNDS.get(request.param, "<img>"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    options = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    process = serve(path, *options, *("--limit-mm-per-prompt", "image=2"), *("--limit-mm-per-prompt", "audio=2"))
    yield Running(process.url, path, SOUNDS.get(request.param, ""))
    assert process.stop() == 0


def picture(made: Any, kind: str = "PNG", **options: Any) -> dict[str, Any]:
    file = io.BytesIO()
    made.save(file, kind, **options)
    encoded = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{encoded}"}}


def sound(seconds: float) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(seconds)).decode(), "format": "wav"}}


def text(answer: Any) -> str:
    assert answer.status == 200, answer.body
    content: str = answer.json["choices"][0]["message"]["content"]
    return content


def odd_images() -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Images of unusual kinds, how they are encoded, and why one is refused, if it is."""
    base, deep = image(3), np.random.RandomState(1).randint(0, 1 << 16, (40, 60), dtype=np.uint16)
    palette, frames = base.convert("P"), {"save_all": True, "append_images": [image(4).convert("P")]}
    palette.info["transparency"] = bytes(range(256))
    return {
        "one pixel": (image(0, 1, 1), {}, ""),
        "narrow": (image(0, 13, 2600), {}, ""),
        "line": (image(0, 3000, 1), {}, "3,000 x 1 pixels, one side must be at most 200 times as long as the other"),
        "animated": (base.convert("P"), {"kind": "GIF", **frames}, "is animated, it has 2 frames"),
        "inks": (base.convert("CMYK"), {"kind": "JPEG"}, ""),
        "palette": (palette, {}, ""),
        "alpha": (base.convert("RGBA"), {}, ""),
        "grey": (base.convert("LA"), {}, ""),
        "bits": (base.convert("1"), {}, ""),
        "deep": (Image.fromarray(deep), {}, "values of more than 8 bits"),
    }


@pytest.mark.parametrize("name", odd_images())
def test_images_of_any_kind_are_read_or_refused_by_name(server: Running, name: str) -> None:
    made, options, said = odd_images()[name]
    answer = server.chat(picture(made, **options), WORD)
    if said:
        assert (answer.status, said in answer.error["message"]) == (400, True), answer.body
    else:
        assert text(answer) == text(server.chat(picture(made, **options), WORD))
    assert server.chat().status == 200


def test_a_server_gives_the_text_that_the_library_gives(server: Running) -> None:
    """Alone, together and streamed, whatever the prompts have."""
    contents: list[tuple[list[Any], dict[str, Any]]] = [
        ([], {}),
        ([picture(image(0))], {"image": [image(0)]}),
        ([picture(image(1)), WORD, picture(image(2, 70, 90))], {"image": [image(1), image(2, 70, 90)]}),
    ]
    if server.sound:
        contents += [([sound(0.7)], {"audio": [wav(0.7)]})]
        contents += [([sound(0.7), picture(image(1))], {"audio": [wav(0.7)], "image": [image(1)]})]
    words = {"text": "w1", "image_url": "<image>", "input_audio": server.sound}
    prompts: list[Any] = [
        {"prompt": "w1 " + "".join(f"{words[part['type']]} " for part in parts), "multi_modal_data": media}
        for parts, media in contents
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(str(server.path), **ENGINE, limit_mm_per_prompt={"image": 2, "audio": 2}) as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, greedy)]
    assert [text(server.chat(*parts)) for parts, _ in contents] == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each: text(server.chat(*each[0])), contents * 3)) == expected * 3
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for (parts, _), wanted in zip(contents, expected, strict=True):
        messages: Any = [{"role": "user", "content": [WORD, *parts]}]
        chunks = client.chat.completions.create(
            model=str(server.path), messages=messages, stream=True, extra_body=SETTINGS
        )
        assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == wanted


def test_more_media_than_a_prompt_may_have_and_damaged_ones_are_refused(server: Running) -> None:
    many = server.chat(*[picture(image(seed)) for seed in range(3)])
    assert (many.status, "2" in many.error["message"]) == (400, True), many.body
    for url in ("data:image/png;base64,AAAA", "data:image/png;base64,!", "data:,", "file:///etc/passwd", "x"):
        refused = server.chat({"type": "image_url", "image_url": {"url": url}})
        assert refused.status == 400, refused.body
    if not server.sound:
        assert server.chat(sound(0.5)).status == 400
    else:
        assert server.chat(*[sound(0.3)] * 3).status == 400
        assert server.chat(sound(40.0)).status == 400


def test_sounds_are_written_down_where_the_model_hears(server: Running) -> None:
    answer = httpx2.post(f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", wav(1.3))}, timeout=60)
    if not server.sound:
        assert answer.status_code == 400, answer.text
        return
    assert answer.status_code == 200, answer.text
    again = httpx2.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(1.3))},
        data={"stream": "true"},
        timeout=60,
    )
    deltas = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: {")]
    assert "".join(each.get("delta", "") for each in deltas).strip() == answer.json()["text"]
