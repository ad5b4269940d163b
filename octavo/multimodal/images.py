"""Decodes the images of callers within limits of time and memory."""

from __future__ import annotations

import io
import warnings
from typing import Any, Final

from octavo.errors import InvalidRequest, MissingLibrary

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS: Final = 1 << 25
"""Most pixels of one image."""
MOST_BYTES: Final = 20 << 20
"""Most bytes of one encoded image."""

MOST_LENGTHS: Final = 200
"""Largest ratio of the longer side of an image to the shorter one: processors scale the shorter one up."""

_MODES: Final = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
"""Pillow's modes with at most eight bits for a value."""


def decoded(given: Any) -> Any:
    """Return an RGB image of Pillow. given: an image of Pillow, encoded bytes, or uint8 [height, width, 3].

    Size, format and depth are known from the header, before any pixel is decoded. Raises InvalidRequest.
    """
    image_class = _pillow()
    if isinstance(given, bytes | bytearray | memoryview):
        return _from_bytes(image_class, bytes(given))
    if isinstance(given, image_class.Image):
        _check(given)
        return given.convert("RGB")
    shape, dtype = getattr(given, "shape", None), str(getattr(given, "dtype", None))
    if shape is not None and len(shape) == 3 and shape[2] == 3 and dtype == "uint8" and min(shape) > 0:
        _check_size(shape[1], shape[0])
        return image_class.fromarray(given)
    what = f"an array {dtype} {list(shape)}" if shape is not None else type(given).__name__
    raise _refused(f"is {what}; give an image of Pillow, encoded bytes, or an array uint8 [height, width, 3]")


def _from_bytes(image_class: Any, data: bytes) -> Any:
    if len(data) > MOST_BYTES:
        raise _refused(f"has {len(data):,} bytes, must have at most {MOST_BYTES:,}; send a smaller one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the limits here are stricter than those it warns of
        try:
            image = image_class.open(io.BytesIO(data), formats=FORMATS)
        except image_class.DecompressionBombError as error:
            raise _refused(f"has far more pixels than {MOST_PIXELS:,}, the limit; scale it down") from error
        except Exception as error:  # whatever it raises is about the bytes
            kinds = ", ".join(FORMATS)
            raise _refused(f"is none of {kinds}, or its header is damaged; send one of them") from error
        _check(image)
        try:
            return image.convert("RGB")
        except Exception as error:  # whatever it raises is about the bytes
            raise _refused(f"cannot be decoded, its {image.format} data are damaged or cut off ({error})") from error


def _check(image: Any) -> None:
    _check_size(image.width, image.height)
    if getattr(image, "n_frames", 1) > 1:
        raise _refused(f"is animated, it has {image.n_frames} frames; send the frames that count as images")
    if image.mode not in _MODES:
        raise _refused(f"has values of more than 8 bits (mode {image.mode}); convert it to 8 bits per channel")


def _check_size(width: int, height: int) -> None:
    has = f"has {width:,} x {height:,} pixels"
    if width * height > MOST_PIXELS:
        raise _refused(f"{has}, must have at most {MOST_PIXELS:,}; scale it down")
    if width < 1 or height < 1:
        raise _refused("has no pixels")
    if max(width, height) > MOST_LENGTHS * min(width, height):
        raise _refused(f"{has}, one side must be at most {MOST_LENGTHS} times as long as the other; cut it")


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"an image of the prompt {reason}", field="multi_modal_data")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingLibrary("images need Pillow: pip install 'octavo[images]'", field="multi_modal_data") from error
    return Image
