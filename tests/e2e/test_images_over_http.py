"""Images over HTTP: every API that has conversations reads them, and counts their tokens."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.vision import image, make_vision_checkpoint
from tests.fakes.warm_server import WarmServer
from tests.server.raw import ask

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}"
    "{% endif %}{% endfor %}"
)
SETTINGS = {"temperature": 0.0, "ignore_eos": True}


def encoded(seed: int) -> str:
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., WarmServer]) -> Iterator[str]:
    path = make_vision_checkpoint("llava", tmp_path_factory.mktemp("llava"))
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    process = serve(path, "--dtype", "float32", "--allowed-local-media-path", str(path))
    image(0).save(path / "image.png")
    yield process.url + f"?{path}"
    assert process.stop() == 0


def answered(url: str, path: str, **fields: Any) -> Any:
    answer = ask(url.partition("?")[0], path, fields)
    assert answer.status == 200, answer.content
    return answer.json


def chat(url: str, seed: int, **fields: Any) -> dict[str, Any]:
    given = fields.pop("image_url", {"url": f"data:image/png;base64,{encoded(seed)}"})
    parts = [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": given}, {"type": "text", "text": "w2"}]
    return answered(url, "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **fields)


def test_all_apis_read_the_same_image_alike(url: str) -> None:
    expected = chat(url, 0, max_tokens=6, **SETTINGS)
    text, num_tokens = expected["choices"][0]["message"]["content"], expected["usage"]["prompt_tokens"]
    assert num_tokens == 18, "two words, and sixteen patches of 14 pixels in an image of 56"
    assert chat(url, 1, max_tokens=6, **SETTINGS)["choices"][0]["message"]["content"] != text

    source = {"type": "base64", "media_type": "image/png", "data": encoded(0)}
    blocks = [{"type": "text", "text": "w1"}, {"type": "image", "source": source}, {"type": "text", "text": "w2"}]
    messages = [{"role": "user", "content": blocks}]
    message = answered(url, "/v1/messages", messages=messages, max_tokens=6, **SETTINGS)
    assert message["content"][0]["text"] == text
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == num_tokens
    assert message["usage"]["cache_read_input_tokens"] == 16, "the block with the image, which came by another API"
    assert answered(url, "/v1/messages/count_tokens", messages=messages) == {"input_tokens": num_tokens}

    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(0)}"}
    parts = [{"type": "input_text", "text": "w1"}, picture, {"type": "input_text", "text": "w2"}]
    items = [{"role": "user", "content": parts}]
    response = answered(url, "/v1/responses", input=items, max_output_tokens=6, **SETTINGS)
    assert response["output"][0]["content"][0]["text"] == text


def test_a_file_of_the_folder_is_the_image_itself(url: str) -> None:
    expected = chat(url, 0, max_tokens=6, **SETTINGS)
    found = chat(url, 0, max_tokens=6, image_url=f"file://{url.partition('?')[2]}/image.png", **SETTINGS)
    assert found["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_the_tokens_of_a_prompt_with_an_image_are_those_that_are_computed(url: str) -> None:
    parts = [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": f"data:image/png;base64,{encoded(0)}"}]
    messages = [{"role": "user", "content": parts}]
    counted = answered(url, "/tokenize", messages=messages)
    assert counted["count"] == len(counted["tokens"]) == 17
    assert counted["media"] == [{"kind": "image", "offset": 1, "length": 16}]
    assert "media" not in answered(url, "/tokenize", prompt="w1")
    assert answered(url, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]["prompt_tokens"] == 17
