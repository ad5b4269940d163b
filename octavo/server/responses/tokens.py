"""The responses of the endpoints about tokens."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class MediaSpan(Struct):
    """The tokens that stand for a part of an image."""

    kind: str
    offset: int
    length: int


class TokenizeResponse(Struct, kw_only=True):
    """Response of `POST /tokenize`. media: absent where no token stands for an image."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    media: list[MediaSpan] | UnsetType = UNSET


class DetokenizeResponse(Struct, kw_only=True):
    """Response of `POST /detokenize`."""

    prompt: str


class TokenCount(Struct, frozen=True):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class InputTokens(Struct, frozen=True):
    """Response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"
