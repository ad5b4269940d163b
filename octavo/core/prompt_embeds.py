"""Prompts that are given as vectors, which take the place of the embeddings of tokens."""

from __future__ import annotations

import base64
import io
import math
from typing import Any, Final

from octavo.core.media import MediaInput, TypedArray, digest_of
from octavo.errors import InvalidRequest

FIELD: Final = "prompt_embeds"


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
    arrays = {FIELD: TypedArray("float32", (len(array), array.shape[1]), array.tobytes())}
    return MediaInput("embeds", digest_of(arrays), ((0, len(array)),), len(array), arrays)


def decoded_embeds(text: str) -> MediaInput:
    """Return what `read_embeds` does. text: Base64 of a file of numpy (.npy). Raises InvalidRequest."""
    import numpy as np

    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        data = base64.b64decode(text, validate=True)
        stream = io.BytesIO(data)
        shape, is_fortran, dtype = readers[np.lib.format.read_magic(stream)](stream)
    except (KeyError, ValueError):  # UnicodeError and binascii.Error among them
        raise _refused(f"{FIELD} is no file of numpy in Base64, as numpy.save writes it") from None
    # what the header states is believed of bytes that are there alone, and no object is read
    if dtype.hasobject or len(data) - stream.tell() != math.prod(shape) * dtype.itemsize:
        raise _refused(f"{FIELD} has other bytes than {dtype} {list(shape)}, which its header states")
    array = np.frombuffer(data, dtype, offset=stream.tell())
    return read_embeds(array.reshape(shape, order="F" if is_fortran else "C"))


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, field=FIELD)
