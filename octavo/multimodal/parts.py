"""Images in the messages of conversations: parts of a content, of which templates see only that they are images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.errors import InvalidRequest
from octavo.multimodal.media_urls import MediaUrls

_KINDS: Final = {"image_url": "image_url", "image": "image", "image_pil": "image_pil"}
"""Types of parts that are images, and where each has its image."""


def without_images(messages: Any, urls: MediaUrls) -> tuple[Any, list[Any]]:
    """Return messages in which `{"type": "image"}` stands for each image, and the images in their order.

    What is no message with a list of parts stays as it is. Images of `image_url` are encoded bytes, others what the
    caller gave. Raises InvalidRequest for a URL that is not read.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages, []
    images: list[tuple[Any, str | None]] = []
    found = [_message(message, f"messages[{index}].content", images) for index, message in enumerate(messages)]
    if len(images) > urls.most_images:  # before any of them is fetched
        raise InvalidRequest(
            f"the messages have {len(images)} images, must have at most {urls.most_images} (limit_mm_per_prompt)",
            field="messages",
        )
    read = [given if field is None else _of_url(given, field, urls) for given, field in images]
    return (found, read) if images else (messages, [])


def _message(message: Any, field: str, images: list[tuple[Any, str | None]]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return message
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _KINDS and part.get(_KINDS[kind]) is not None:
            images.append((part[_KINDS[kind]], f"{field}[{number}]" if kind == "image_url" else None))
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _of_url(given: Any, field: str, urls: MediaUrls) -> bytes:
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise InvalidRequest(f'{field}.image_url has no url; give {{"url": "data:image/png;base64,…"}}', field=field)
    return urls.read(url, f"{field}.image_url.url")
