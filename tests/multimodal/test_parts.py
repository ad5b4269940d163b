"""Images in messages: what templates see, and which URLs are read."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.multimodal.parts import without_images

URL = "data:image/png;base64," + base64.b64encode(b"abc").decode()


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_templates_see_that_there_are_images_and_where() -> None:
    text = {"type": "text", "text": "what is this?"}
    given = object()
    found, images = without_images(
        user({"type": "image_url", "image_url": {"url": URL}}, text, {"type": "image", "image": given})
        + user({"type": "image_pil", "image_pil": given}, {"type": "image_url", "image_url": URL})
    )
    mark = {"type": "image"}
    assert [message["content"] for message in found] == [[mark, text, mark], [mark, mark]]
    assert images == [b"abc", given, given, b"abc"]


@pytest.mark.parametrize("messages", [user("a", {"type": "text", "text": "b"}), [{"role": "user", "content": "a"}], 3])
def test_messages_without_images_stay_as_they_are(messages: Any) -> None:
    assert without_images(messages) == (messages, [])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1/x.png", "begins with 'http'"),
        ("file:///etc/passwd", "begins with 'file'"),
        ("data:image/png,abc", "without ;base64"),
        ("data:image/png;base64,a!b", "is no base64"),
        ("data:image/png;base64," + "A" * (1 << 25), "more than an image of"),
        ({"uri": URL}, "has no url"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_urls_are_refused_by_name(url: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        without_images(user("a", {"type": "image_url", "image_url": url}))
    assert caught.value.field == "messages[0].content[1]"
