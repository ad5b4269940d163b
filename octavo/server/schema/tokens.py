"""The bodies of `POST /tokenize`, `/detokenize`, `/pin_prefix` and `/unpin_prefix`, and the responses about tokens."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.errors import InvalidRequest
from octavo.server.decode import Refused, RequestBody, TokenId
from octavo.server.schema.chat import Message
from octavo.server.schema.tools import Tool, check_tools

AS_STORED: Final = Refused("images, videos and sounds are read as the checkpoint says; leave it out", harmless=({},))


class TextRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """The common fields of requests about a text or a conversation."""

    model: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    mm_processor_kwargs: Annotated[Any, AS_STORED] = None
    media_io_kwargs: Annotated[Any, AS_STORED] = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long, and for tools without messages."""
        RequestBody.check(self)
        if self.tools and self.messages is None:
            raise InvalidRequest("tools are for messages; send messages, or leave tools out", field="tools")
        check_tools(self.tools, None)


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
