"""Images in messages: what templates see, and which URLs are read."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.errors import InvalidRequest
from octavo.multimodal.media_urls import MediaUrls
from octavo.multimodal.parts import without_media

URL = "data:image/png;base64," + base64.b64encode(b"abc").decode()
URLS = MediaUrls(EngineArgs())


def takes_all(kind: str, field: str) -> None:
    """The check of a model that takes every kind."""


THREE = EngineArgs(limit_mm_per_prompt={"video": 3})


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_templates_see_that_there_are_images_and_where() -> None:
    text = {"type": "text", "text": "what is this?"}
    given = object()
    found, media, places = without_media(
        user({"type": "image_url", "image_url": {"url": URL}}, text, {"type": "image", "image": given})
        + user({"type": "image_pil", "image_pil": given}, {"type": "image_url", "image_url": URL}),
        URLS,
        takes_all,
    )
    mark = {"type": "image"}
    assert [message["content"] for message in found] == [[mark, text, mark], [mark, mark]]
    assert media == {"image": [b"abc", given, given, b"abc"]}
    at = [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert places == {"image": [f"messages[{message}].content[{part}]" for message, part in at]}


@pytest.mark.parametrize("messages", [user("a", {"type": "text", "text": "b"}), [{"role": "user", "content": "a"}], 3])
def test_messages_without_media_stay_as_they_are(messages: Any) -> None:
    assert without_media(messages, URLS, takes_all) == (messages, {}, {})


@pytest.mark.parametrize(
    ("url", "message"), [("http://127.0.0.1/x.png", "begins with 'http'"), ({"uri": URL}, "has no url")]
)
def test_a_url_that_is_not_read_is_named_by_its_place(url: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        without_media(user("a", {"type": "image_url", "image_url": url}), URLS, takes_all)
    assert str(caught.value.field).startswith("messages[0].content[1]")


def test_more_images_than_a_prompt_may_have_are_not_read() -> None:
    parts = [{"type": "image_url", "image_url": "not read"}] * 3
    with pytest.raises(InvalidRequest, match=r"have 3 images, must have at most 2 \(limit_mm_per_prompt\)"):
        without_media(user(*parts), MediaUrls(EngineArgs(limit_mm_per_prompt={"image": 2})), takes_all)


def test_what_the_model_does_not_take_is_refused_by_its_place_before_anything_is_read() -> None:
    def check(kind: str, field: str) -> None:
        if kind == "audio":
            raise InvalidRequest(f"{field} is a sound", field=field)

    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\] is a sound"):
        without_media(user({"type": "image_url", "image_url": {"url": "not read"}}, sound), URLS, check)


def test_a_video_is_its_frames() -> None:
    frame = base64.b64encode(b"abc").decode()
    url = f"data:video/jpeg;base64,{frame},{frame}"
    parts = {"type": "video_url", "video_url": {"url": url, "fps": 2}}, {"type": "video", "video": [1]}
    given = user({"type": "video_url", "video_url": url}, *parts)
    (found,), media, _ = without_media(given, MediaUrls(THREE), takes_all)
    assert found["content"] == [{"type": "video"}] * 3
    assert media == {"video": [[b"abc", b"abc"], ([b"abc", b"abc"], {"fps": 2}), [1]]}
    with pytest.raises(InvalidRequest, match="have 3 videos, must have at most 2"):
        without_media(user(*parts, parts[1]), URLS, takes_all)
    with pytest.raises(InvalidRequest, match="send 1 to 128 frames as data:video/jpeg"):
        without_media(user({"type": "video_url", "video_url": "https://x/y.mp4"}), URLS, takes_all)
