"""Prompts that are given as vectors, which take the place of the embeddings of tokens."""

from __future__ import annotations

import base64
import re
from typing import Any, Final

from octavo.core.media import MediaInput, digest_of, typed_array
from octavo.errors import InvalidRequest

FIELD: Final = "prompt_embeds"

_START: Final = re.compile(rb"\x93NUMPY(?:\x01\x00(..)|\x02\x00(....))", re.DOTALL)
"""What a file of numpy begins with, up to the number of bytes of its header."""
_HEADER: Final = re.compile(
    rb"""\{\s*'descr':\s*'([<>=]f[248])',
    \s*'fortran_order':\s*(True|False),
    \s*'shape':\s*\((\d{1,9}),\s*(\d{1,9}),?\s*\),?\s*\}\s*""",
    re.VERBOSE,
)
"""The header of a table of floating-point numbers. It is not evaluated, as numpy does, which takes any literal."""


def read_embeds(value: Any) -> MediaInput:
    """Return what stands for all tokens of a prompt. value: [tokens, width], of numpy or a tensor of any float type.

    Raises InvalidRequest for anything else, and for numbers that are not finite.
    """
    import numpy as np  # not where arguments alone are read

    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach().cpu().float().numpy()
    array = value if isinstance(value, np.ndarray) else None
    if array is None or array.ndim != 2 or array.dtype.kind != "f" or not array.size:
        shown = type(value).__name__ if array is None else f"{array.dtype} {list(array.shape)}"
        raise _refused(f"{FIELD} is {shown}, expected floating-point numbers [tokens, width], at least one row")
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise _refused(f"{FIELD} has numbers that are not finite in float32; give others")
    arrays = {FIELD: typed_array(array)}
    return MediaInput("embeds", digest_of(arrays), ((0, len(array)),), len(array), arrays)


def decoded_embeds(text: str) -> MediaInput:
    """Return what `read_embeds` does. text: Base64 of a file of numpy (.npy). Raises InvalidRequest."""
    import numpy as np

    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:  # UnicodeError and binascii.Error among them
        data = b""
    start = _START.match(data)
    begin = 0 if start is None else start.end() + int.from_bytes(start[1] or start[2], "little")
    header = None if start is None else _HEADER.fullmatch(data, start.end(), begin)
    if header is None:
        raise _refused(
            f"{FIELD} is no file of numpy in Base64, as numpy.save writes floating-point numbers [tokens, width]"
        )
    dtype, shape = np.dtype(header[1].decode()), (int(header[3]), int(header[4]))
    # memory is taken for bytes that are there, never for a size that the header alone states
    if len(data) - begin != shape[0] * shape[1] * dtype.itemsize:
        raise _refused(f"{FIELD} lacks bytes or has too many for {dtype} {list(shape)}, as its header states; send all")
    array = np.frombuffer(data, dtype, offset=begin)
    return read_embeds(array.reshape(shape, order="F" if header[2] == b"True" else "C"))


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, field=FIELD)
