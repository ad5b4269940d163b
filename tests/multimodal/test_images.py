"""Images of callers: what is decoded, and what is refused before it costs anything."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo.errors import InvalidRequest
from octavo.multimodal.images import MOST_BYTES, decoded


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(width: int = 6, height: int = 4, mode: str = "RGB") -> Any:
    return Image.new(mode, (width, height), 1)


def lying_png(width: int, height: int) -> bytes:
    """A PNG whose header states a size that its data do not have."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_usual_formats_are_read(kind: str) -> None:
    found = decoded(encoded(plain(), kind))
    assert (found.size, found.mode) == ((6, 4), "RGB")


def test_images_and_arrays_are_taken_as_they_are() -> None:
    pixels = np.random.RandomState(0).randint(0, 255, (4, 6, 3), dtype=np.uint8)
    for given in (pixels, Image.fromarray(pixels), encoded(Image.fromarray(pixels))):
        assert (np.asarray(decoded(given)) == pixels).all()
    assert decoded(plain(mode="L")).mode == "RGB"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "is none of PNG, JPEG"),
        (b"<svg/>", "is none of PNG, JPEG"),
        (b"\0" * (MOST_BYTES + 1), "must have at most"),
        (encoded(plain())[:40], "damaged"),
        (encoded(plain(200, 200))[:-60], "damaged or cut off"),
        (lying_png(60_000, 60_000), "far more pixels than"),
        (lying_png(6_000, 6_000), "6,000 x 6,000 pixels"),
        (lying_png(300, 300), "damaged or cut off"),
        (encoded(Image.new("RGB", (1, 201)), "PNG"), "has 1 x 201 pixels, one side must be at most 200 times"),
        (np.zeros((201, 1, 3), np.uint8), "has 1 x 201 pixels, one side must be at most 200 times"),
        (encoded(plain(), "GIF", save_all=True, append_images=[Image.new("RGB", (6, 4), 9)]), "animated"),
        (encoded(Image.new("I;16", (4, 4))), "more than 8 bits"),
        (3, "is int"),
        (np.zeros((4, 4, 3), np.float32), r"array float32 \[4, 4, 3\]"),
        (np.zeros((4, 4), np.uint8), r"array uint8 \[4, 4\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decoded(given)
