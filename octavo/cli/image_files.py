"""Images of a terminal's conversation: files become parts of messages."""

from __future__ import annotations

import base64
import mimetypes
from os.path import expanduser
from pathlib import Path
from typing import Any, Final

from octavo.errors import ConfigError, InvalidRequest

MOST_BYTES: Final = 20 << 20
"""Of a file; models are given no larger images."""


def image_part(path: Path) -> dict[str, Any]:
    """Return the part of a message that an image file is. Raises ConfigError or InvalidRequest."""
    try:
        with open(expanduser(path), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{path} has more than {MOST_BYTES:,} bytes, the most of an image; scale it down")
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
