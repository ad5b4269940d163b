"""Images, videos and sounds in the messages of conversations: a template sees a placeholder for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.multimodal.media_urls import MediaUrls
from octavo.multimodal.videos import MOST_FRAMES

_FIELD: Final = "multi_modal_data"
_KINDS: Final = {
    "image_url": ("image", "image_url"),
    "image": ("image", "image"),
    "image_pil": ("image", "image_pil"),
    "video_url": ("video", "video_url"),
    "video": ("video", "video"),
    "input_audio": ("audio", "input_audio"),
    "audio": ("audio", "audio"),
}
"""Types of parts that are images, videos and sounds: the kind of each, and the key that holds its input."""


def without_media(
    messages: Any, urls: MediaUrls, check: Callable[[str, str], None]
) -> tuple[Any, dict[str, list[Any]], dict[str, list[str]]]:
    """Return messages in which `{"type": "image"}` stands for each image and `{"type": "video"}` for each video, and
    by kind what they stand for and where it was, in order.

    What is no message with a list of parts stays as it is. Of URLs the encoded bytes are returned, of others what the
    caller gave. `check` gets the kind and the place of each part before any is read, and raises where the model does
    not take it. Raises InvalidRequest for a URL that is not read.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages, {}, {}
    media: list[_Part] = []
    found = [_message(message, f"messages[{index}].content", media) for index, message in enumerate(messages)]
    if not media:
        return messages, {}, {}
    read: dict[str, list[Any]] = {}
    places: dict[str, list[str]] = {}
    for kind in ("image", "video", "audio"):
        own = [part for part in media if part.kind == kind]
        if len(own) > urls.limits[kind]:  # before any of them is fetched
            raise InvalidRequest(
                f"the messages have {len(own)} {kind}s, must have at most {urls.limits[kind]} (limit_mm_per_prompt)",
                field="messages",
            )
    for part in media:
        check(part.kind, part.field)
        places.setdefault(part.kind, []).append(part.field)
    for part in media:
        read.setdefault(part.kind, []).append(_of_url(part, urls) if part.is_encoded else part.given)
    return found, read, places


@contextmanager
def naming_parts(prompt: Prompt) -> Iterator[None]:
    """Let an InvalidRequest about what a prompt brings name the only part of that kind, or the messages, where the
    prompt was made of such."""
    try:
        yield
    except InvalidRequest as error:
        name, _, kind = (error.field or "").partition(".")
        if prompt.media_places is None or name != _FIELD:
            raise
        places = prompt.media_places.get(kind) or [each for found in prompt.media_places.values() for each in found]
        stated, error.field = error.field or "", places[0] if len(places) == 1 else "messages"
        error.args = (str(error).replace(stated, error.field),)
        raise


class _Part(NamedTuple):
    kind: str
    given: Any
    field: str
    is_encoded: bool


def _message(message: Any, field: str, media: list[_Part]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return message
    parts = []
    for number, part in enumerate(content):
        stated = part.get("type") if isinstance(part, Mapping) else None
        kind, name = _KINDS.get(stated, ("", "")) if isinstance(stated, str) else ("", "")
        if kind and part.get(name) is not None:
            is_encoded = name.endswith("_url") or name == "input_audio"
            media.append(_Part(kind, part[name], f"{field}[{number}]", is_encoded))
            parts.append({"type": kind})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _of_url(part: _Part, urls: MediaUrls) -> Any:
    kind, given, field, _ = part
    if kind == "audio":
        data = given.get("data") if isinstance(given, Mapping) else None
        if not isinstance(data, str):
            raise InvalidRequest(
                f'{field}.input_audio has no data; give {{"data": "BASE64", "format": "wav"}}', field=field
            )
        return urls.read(f"data:audio/wav;base64,{data}", f"{field}.input_audio.data")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise InvalidRequest(f'{field}.{kind}_url has no url; give {{"url": "data:image/png;base64,…"}}', field=field)
    if kind == "image":
        return urls.read(url, f"{field}.image_url.url")
    head, *frames = url.split(",")
    if head != "data:video/jpeg;base64" or not 0 < len(frames) <= MOST_FRAMES:
        raise InvalidRequest(
            f"{field}.video_url.url is not read here: send 1 to {MOST_FRAMES} frames as "
            "data:video/jpeg;base64,FIRST,SECOND,…, each a JPEG image",
            field=field,
            code="unsupported_video_url",
        )
    read = [urls.read(f"data:image/jpeg;base64,{frame}", f"{field}.video_url.url") for frame in frames]
    fps = given.get("fps") if isinstance(given, Mapping) else None
    return read if fps is None else (read, {"fps": fps})
