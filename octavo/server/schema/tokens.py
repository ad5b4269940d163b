"""The bodies of `POST /tokenize`, `/detokenize`, `/pin_prefix` and `/unpin_prefix`, and responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.decode import Refused, RequestBody, TokenId
from octavo.server.schema.bodies import PromptBody, TokensBody
from octavo.server.schema.chat import Message
from octavo.server.schema.common import prompt_of
from octavo.server.schema.tools import Tool, check_tools

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

AS_STORED: Final = Refused("images, videos and sounds are read as the checkpoint says; leave it out", harmless=({},))


class TextRequest(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The common fields of requests about a text or a conversation. opens_turn: the prompt of a conversation ends with
    the begin of a turn of the model, unless the request says otherwise."""

    opens_turn: ClassVar[bool]
    if TYPE_CHECKING:
        prompt: str | list[int] | None

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

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if self.prompt is not None:
            return [prompt_of(self.prompt, self.add_special_tokens)]
        return [preparer.rendered(self, opens_turn=self.opens_turn)]


class TokenizeRequest(TextRequest, TokensBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: text, or a conversation."""

    opens_turn = True

    prompt: str | None = None
    return_token_strs: bool | None = None

    def answer(self, preparer: Preparer) -> TokenizeResponse:
        tokens, media = preparer.read(self)
        spans = [MediaSpan(each.kind, *span) for each in media if each.kind != "prompt" for span in each.spans]
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=preparer.tools.ready.max_model_len,
            tokens=tokens,
            token_strs=[*map(preparer.tools.tokenizer.token_text, tokens)] if self.return_token_strs else None,
            media=spans or UNSET,
        )


class DetokenizeRequest(TokensBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False

    def answer(self, preparer: Preparer) -> DetokenizeResponse:
        vocab_size = preparer.tools.ready.vocab_size
        for position, token_id in enumerate(self.tokens):
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"tokens[{position}] is {token_id}; the model's token ids go from 0 to {vocab_size - 1}",
                    field=f"tokens[{position}]",
                )
        return DetokenizeResponse(preparer.tools.tokenizer.decode(self.tokens, self.skip_special_tokens))


class PrefixRequest(TextRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /unpin_prefix`: text, token ids, or the first messages of conversations, which other messages follow."""

    opens_turn = False

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


class DetokenizeResponse(Struct):
    """Response of `POST /detokenize`."""

    prompt: str
