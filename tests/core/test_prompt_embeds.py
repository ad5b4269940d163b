"""The forms of prompts that are given as vectors."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.prompt import Prompt
from octavo.core.prompt_embeds import decoded_embeds, read_embeds
from octavo.errors import InvalidRequest


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[1.0]], "is list, expected floating-point numbers"),
        (torch.zeros(4), r"is float32 \[4\], expected floating-point numbers \[tokens, width\]"),
        (np.zeros((2, 3), dtype=np.int64), r"is int64 \[2, 3\], expected"),
        (torch.zeros(0, 64), r"is float32 \[0, 64\], expected"),
        (np.full((1, 4), 1e300), "has numbers that are not finite in float32"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt_embeds {said}"):
        read_embeds(value)


def test_a_prompt_has_vectors_or_something_else() -> None:
    for more in ({"prompt": "x"}, {"multi_modal_data": {"image": 1}}):
        with pytest.raises(InvalidRequest):
            Prompt.read({"prompt_embeds": torch.zeros(1, 4), **more})


def encoded(array: np.ndarray[Any, Any], *, pickled: bool = False) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=pickled)
    return base64.b64encode(stream.getvalue()).decode()


def test_files_of_numpy_are_read_without_their_pickles() -> None:
    given = np.arange(6, dtype=np.float16).reshape(2, 3)
    assert decoded_embeds(encoded(given)) == read_embeds(given)
    assert decoded_embeds(encoded(np.asfortranarray(given))) == read_embeds(given)
    whole = base64.b64decode(encoded(given))
    huge = whole.replace(b"(2, 3)", b"(2, 99999999)".ljust(6))
    for wrong in (b"", b"text", whole[:-1], whole + b"0", whole[:9], huge):
        with pytest.raises(
            InvalidRequest, match=r"^prompt_embeds (is no file of numpy|lacks bytes or has too many for)"
        ):
            decoded_embeds(base64.b64encode(wrong).decode())
    for other in (np.array([[{}]]), np.zeros((2, 3), np.int32), np.zeros(3, np.float32), np.zeros((1, 2), "f4,f4")):
        with pytest.raises(InvalidRequest, match="is no file of numpy"):
            decoded_embeds(encoded(other, pickled=True))
    spaces = np.frombuffer(b" " * 24, np.float32).reshape(2, 3)
    assert decoded_embeds(encoded(spaces)) == read_embeds(spaces)
    with pytest.raises(InvalidRequest, match="is no file of numpy"):
        decoded_embeds("é")


@pytest.mark.parametrize(
    ("descr", "shape", "num_bytes"),
    [
        ("'<f4'", "(-2, -3)", 24),
        ("'<f4'", "(0, 999999999999999999999)", 0),
        ("'<f4'", "(0, 4)", 0),
        ("'<f4'", "(True, True)", 4),
        ("'<f4'", "(" + "1, " * 70 + ")", 4),
        ("'|V0'", "(2, 3)", 0),
        ("('<f4', (2,))", "(2, 3)", 48),
        ("()", "(2, 3)", 24),
        ("{[]: 1}", "(2, 3)", 24),
        ("(((", "(2, 3)", 24),
        ("-" * 9000 + "1", "(2, 3)", 24),
    ],
)
def test_files_whose_headers_are_no_table_are_refused(descr: str, shape: str, num_bytes: int) -> None:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    for version in (b"\x01\x00" + len(header).to_bytes(2, "little"), b"\x02\x00" + len(header).to_bytes(4, "little")):
        given = b"\x93NUMPY" + version + header + bytes(num_bytes)
        with pytest.raises(InvalidRequest, match="^prompt_embeds "):
            decoded_embeds(base64.b64encode(given).decode())
