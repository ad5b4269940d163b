"""The responses of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from msgspec import Struct


class TokenizeResponse(Struct, kw_only=True):
    """Response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, kw_only=True):
    """Response of `POST /detokenize`."""

    prompt: str
