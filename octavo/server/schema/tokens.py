"""The bodies of `POST /tokenize`, `/detokenize`, `/pin_prefix` and `/unpin_prefix`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from octavo.server.decode import RequestBody, TokenId
from octavo.server.schema.chat import Message


class TextRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """What requests about a text or a conversation have in common."""

    model: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: text, or a conversation."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class PrefixRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /unpin_prefix`: text, token ids, or the first messages of conversations."""

    prompt: str | list[TokenId] | None = None
    cache_salt: str | None = None


class PinPrefixRequest(PrefixRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /pin_prefix`: a prefix, and for how many seconds it stays."""

    ttl_s: float
