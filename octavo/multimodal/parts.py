"""Images in the messages of conversations: parts of a content, of which templates see only that they are images."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

from octavo.errors import InvalidRequest
from octavo.multimodal.images import MOST_BYTES

_KINDS: Final = {"image_url": "image_url", "image": "image", "image_pil": "image_pil"}
"""Types of parts that are images, and where each has its image."""


def without_images(messages: Any) -> tuple[Any, list[Any]]:
    """Return messages in which `{"type": "image"}` stands for each image, and the images in their order.

    What is no message with a list of parts stays as it is. Images of `image_url` are encoded bytes, others what the
    caller gave. Raises InvalidRequest for a URL that is not read.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages, []
    images: list[Any] = []
    found = [_message(message, f"messages[{index}].content", images) for index, message in enumerate(messages)]
    return (found, images) if images else (messages, [])


def _message(message: Any, field: str, images: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return message
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _KINDS and part.get(_KINDS[kind]) is not None:
            given = part[_KINDS[kind]]
            images.append(_of_url(given, f"{field}[{number}]") if kind == "image_url" else given)
            parts.append({"type": "image"})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _of_url(given: Any, field: str) -> bytes:
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise InvalidRequest(f'{field}.image_url has no url; give {{"url": "data:image/png;base64,…"}}', field=field)
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma:
        scheme = url.partition(":")[0][:20]
        raise InvalidRequest(
            f"{field}.image_url.url begins with {scheme!r}; this server fetches nothing: send the image itself as "
            "data:image/png;base64,…",
            field=field,
            code="unsupported_image_url",
        )
    if not head.endswith(";base64"):
        raise InvalidRequest(f"{field}.image_url.url is a data: URL without ;base64; encode the image so", field=field)
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise InvalidRequest(
            f"{field}.image_url.url has {len(body):,} characters, more than an image of {MOST_BYTES:,} bytes has; send "
            "a smaller one",
            field=field,
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{field}.image_url.url is no base64 ({error})", field=field) from error
