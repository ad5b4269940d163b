"""Makes prompts from requests, in the server's process or in a helper process, which sends them back encoded."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import msgspec

from octavo.config.server_args import ServerArgs
from octavo.core.media import MediaInput
from octavo.core.prompt import Prompt, checked_text
from octavo.engine.chat_template import ChatOptions
from octavo.engine.fill_in import fill_in_prompt
from octavo.engine.input_processor import InputProcessor, InputSetup
from octavo.engine.template_budget import RenderLimits
from octavo.engine.vector_input import num_unseen_of
from octavo.errors import InvalidRequest
from octavo.multimodal.media_urls import MustReadElsewhere
from octavo.server.decode import RequestBody
from octavo.server.formats.format import AUTO
from octavo.server.formats.reading import ModelFormat
from octavo.server.forms import FormFields
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.chat_batch import ChatBatchRequest, of_conversation
from octavo.server.schema.cohere_chat import CohereChatRequest, CohereUserMessage
from octavo.server.schema.common import prompt_of
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.generate import GenerateRequest
from octavo.server.schema.infill import InfillRequest
from octavo.server.schema.messages import CountTokensRequest
from octavo.server.schema.pairs import PairsRequest
from octavo.server.schema.responses import InputTokensRequest
from octavo.server.schema.scoring import GenerativeScoringRequest
from octavo.server.schema.shim import ShimRequest
from octavo.server.schema.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    InputTokens,
    MediaSpan,
    PrefixRequest,
    TokenCount,
    TokenizeRequest,
    TokenizeResponse,
)
from octavo.server.schema.tools import Tool
from octavo.server.schema.vectors import InputRequest, VectorRequest

_PROMPTS: Final = ("prompt_embeds", "messages", "input", "prompt")
"""The fields that prompts are made of; a request has one of them."""

T = TypeVar("T")

_encode: Final = msgspec.msgpack.Encoder().encode

TokensRequest = TokenizeRequest | DetokenizeRequest | CountTokensRequest | InputTokensRequest
"""The requests whose response is about tokens alone."""


class TextPolicy(msgspec.Struct, frozen=True):
    """What requests may do. The fields are the server's arguments of the same names."""

    trust_request_chat_template: bool = False
    allow_special_tokens_in_content: bool = False
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    enable_auto_tool_choice: bool = True
    exclude_tools_when_tool_choice_none: bool = False

    @classmethod
    def of(cls, args: ServerArgs) -> TextPolicy:
        return cls(**{name: getattr(args, name) for name in cls.__struct_fields__})


class TextSetup(msgspec.Struct, frozen=True):
    """What helper processes need to know."""

    input: InputSetup
    policy: TextPolicy


@dataclass(frozen=True)
class Preparer:
    """Makes prompts, and responses about tokens. Every method raises InvalidRequest or ApiError for a wrong request."""

    tools: InputProcessor
    policy: TextPolicy
    most_s: float | None = None
    """Seconds of processor time after which a request with several prompts is left to a process for long jobs; None:
    never."""

    @cached_property
    def format(self) -> ModelFormat:
        policy, tools = self.policy, self.tools
        parsers = policy.tool_call_parser, policy.reasoning_parser
        return ModelFormat(tools.tokenizer_info, tools.tokenizer, parsers, allows_auto=policy.enable_auto_tool_choice)

    def prompts(self, asked: RequestBody, limits: RenderLimits | None = None) -> list[Prompt]:
        """Return the prompts of a request, not tokenised yet, and check its form. limits: bounds of rendering."""
        if isinstance(asked, ShimRequest):
            chat = asked.as_chat()
            if chat.thinking_token_budget is not None and not self.format.marks_reasoning:
                chat.thinking_token_budget = None  # clients send it to every model
            with asked.named():
                return self.prompts(chat, limits)
        if isinstance(asked, ChatBatchRequest):
            return self._of_each(asked, limits)
        if isinstance(asked, InputRequest) and asked.messages is not None:
            self.tools.vectors.checked(asked.params().task)
            prompt = self._rendered(asked, limits, opens_turn=False)
            return [msgspec.structs.replace(prompt, add_special_tokens=bool(asked.add_special_tokens))]
        if isinstance(asked, GenerateRequest):
            self.tools.vectors.refuse_text()
            asked.as_completion().check_form()
            return asked.prompts()
        if isinstance(asked, VectorRequest | InfillRequest | GenerativeScoringRequest):
            return asked.prompts(self.tools)
        if isinstance(asked, FormFields):
            self.tools.vectors.refuse_text()
            asked.check_form()
        if isinstance(asked, CompletionRequest):
            if asked.suffix:
                return [self._filled_in(each, asked.suffix, asked.add_special_tokens) for each in asked.prompts()]
            return [prompt_of(each, asked.add_special_tokens) for each in asked.prompts()]
        if isinstance(asked, ChatCompletionRequest):
            self.format.check(asked)
            prompt = self._rendered(asked, limits)
            if asked.prediction is not None:
                prompt = msgspec.structs.replace(prompt, prediction=checked_text(asked.prediction.text, "prediction"))
        else:
            assert isinstance(asked, PrefixRequest | TokenizeRequest)
            prompt = self._prompt_or_messages(asked, limits)
        if asked.add_special_tokens is None:
            return [prompt]
        return [msgspec.structs.replace(prompt, add_special_tokens=asked.add_special_tokens)]

    def _of_each(self, asked: ChatBatchRequest, limits: RenderLimits | None) -> list[Prompt]:
        prompts: list[Prompt] = []
        for index in within(self.most_s, range(len(asked.messages))):
            with of_conversation(index):
                prompts += self.prompts(asked.chat(index), limits)
        return prompts

    def _filled_in(self, prompt: str | list[int] | Prompt, suffix: str, adds: bool | None) -> Prompt:
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt of text, not of token ids", field="suffix")
        self.tools.check_text_length(prompt, "prompt")
        self.tools.check_text_length(suffix, "suffix")
        return fill_in_prompt(self.tools.tokenizer, prompt, suffix, adds_special_tokens=adds is not False)

    def response(self, asked: TokensRequest, limits: RenderLimits | None = None) -> TokensResponse:
        """Return the response of an endpoint about tokens. limits: bounds of rendering."""
        value = self._detokenized(asked) if isinstance(asked, DetokenizeRequest) else self._counted(asked, limits)
        return TokensResponse(asked.model, msgspec.json.encode(value))

    def _counted(
        self, asked: TokenizeRequest | CountTokensRequest | InputTokensRequest, limits: RenderLimits | None
    ) -> TokenizeResponse | TokenCount | InputTokens:
        tokenizer = self.tools.tokenizer
        [prompt] = self.prompts(asked, limits)
        tokens = prompt.token_ids or tokenizer.encode(prompt.text or "", prompt.add_special_tokens, prompt.cuts)
        media: Sequence[MediaInput] = ()
        if prompt.multi_modal_data:
            tokens, media = self.tools.media.read(prompt, tokens)
        if isinstance(asked, CountTokensRequest):
            return TokenCount(len(tokens))
        if isinstance(asked, InputTokensRequest):
            return InputTokens(len(tokens))
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=self.tools.ready.max_model_len,
            tokens=tokens,
            token_strs=[*map(tokenizer.token_text, tokens)] if asked.return_token_strs else None,
            media=[MediaSpan(each.kind, *span) for each in media if each.kind != "prompt" for span in each.spans]
            or msgspec.UNSET,
        )

    def _detokenized(self, asked: DetokenizeRequest) -> DetokenizeResponse:
        vocab_size = self.tools.ready.vocab_size
        for position, token_id in enumerate(asked.tokens):
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"tokens[{position}] is {token_id}; the model's token ids go from 0 to {vocab_size - 1}",
                    field=f"tokens[{position}]",
                )
        text = self.tools.tokenizer.decode(asked.tokens, asked.skip_special_tokens)
        return DetokenizeResponse(prompt=text)

    def _prompt_or_messages(self, asked: PrefixRequest | TokenizeRequest, limits: RenderLimits | None) -> Prompt:
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if asked.prompt is not None:
            return prompt_of(asked.prompt)
        # in prompts that begin with a prefix, other messages follow it, not the model's turn
        return self._rendered(asked, limits, opens_turn=isinstance(asked, TokenizeRequest))

    def _rendered(
        self,
        asked: ChatCompletionRequest | TokenizeRequest | PrefixRequest | InputRequest,
        limits: RenderLimits | None,
        *,
        opens_turn: bool = True,
    ) -> Prompt:
        """Return the prompt that the model's chat template makes of the messages.

        opens_turn: whether the prompt ends with the begin of a turn of the model, unless the request sets it.
        """
        if asked.chat_template is not None and not self.policy.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template is a program, and this server runs none from requests; leave it out, or start the "
                "server with --trust-request-chat-template",
                field="chat_template",
                code="unsupported_parameter",
            )
        continues, opens = bool(asked.continue_final_message), asked.add_generation_prompt
        options = ChatOptions(
            add_generation_prompt=opens_turn and not continues if opens is None else opens,
            continue_final_message=continues,
            chat_template=asked.chat_template,
            chat_template_kwargs=asked.template_values
            if isinstance(asked, ChatCompletionRequest)
            else asked.chat_template_kwargs,
            allow_special_tokens_in_content=self.policy.allow_special_tokens_in_content,
        )
        messages = [message.as_dict(f"messages[{index}]") for index, message in enumerate(asked.messages or [])]
        leaves_out = self.policy.exclude_tools_when_tool_choice_none and getattr(asked, "tool_choice", None) == "none"
        given: list[Tool] | None = getattr(asked, "tools", None)
        if given and not leaves_out:
            messages, tools = self.format.with_tools(messages, [tool.as_dict() for tool in given])
            options = msgspec.structs.replace(options, tools=tools)
        return self.tools.render_chat(messages, options, limits)


class TokensResponse(msgspec.Struct, frozen=True, array_like=True):
    """The model that a request about tokens names, and the response as JSON."""

    model: str | None
    body: bytes


class PreparedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A tokenised prompt. token_ids, prediction: 4 bytes each, in the byte order of the machine."""

    text: str | None
    token_ids: bytes
    prediction: bytes
    second_start: int = 0
    num_unseen: int = 0
    media: tuple[MediaInput, ...] = ()


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """What a helper process makes of a request: the request without its text, and its prompts."""

    asked: msgspec.Raw
    prompts: list[PreparedPrompt]


def within(most_s: float | None, items: Iterable[T]) -> Iterator[T]:
    """Yield the items. Raises MustReadElsewhere when that has taken more than `most_s` seconds of processor time."""
    began = time.process_time()
    for item in items:
        yield item
        if most_s is not None and time.process_time() - began > most_s:
            raise MustReadElsewhere(fetches=False)


def prepared(
    asked: RequestBody, prompts: Sequence[Prompt], tools: InputProcessor, most_s: float | None = None
) -> bytes:
    """Return an encoded `Prepared`. most_s: see `Preparer.most_s`. Raises InvalidRequest."""
    keeps_text = isinstance(asked, CompletionRequest) and bool(asked.echo)
    num_kept = getattr(asked, "truncate_prompt_tokens", None)
    done = []
    for index, prompt in enumerate(within(most_s, prompts)):
        try:
            if isinstance(asked, VectorRequest):
                params = asked.params()
                spelled = tools.media.spelled(prompt)
                whole, second_start = tools.vectors.read_ids(spelled, params)
                num_unseen = num_unseen_of(prompt, len(whole))
                whole, media = tools.media.read(prompt, whole, params.truncate_prompt_tokens)
                done.append(PreparedPrompt(None, array("i", whole).tobytes(), b"", second_start, num_unseen, media))
                continue
            written, media = tools.media.read(prompt, tools.tokenised(prompt, num_kept), num_kept)
            token_ids = array("i", written).tobytes()
            prediction = array("i", tools.predicted(prompt)).tobytes()
        except InvalidRequest as error:
            names = (getattr(asked, "texts_field", ""), *_PROMPTS)
            is_listed = len(prompts) > 1 and getattr(asked, "lists_prompts", False)
            if is_listed or not (error.field or "").startswith("messages["):
                error.field = next((name for name in names if getattr(asked, name, None) is not None), None)
            if is_listed:
                error.field = f"{error.field}[{index}]"
                error.args = (f"{error.field}: {error}",)
            raise
        done.append(PreparedPrompt(prompt.text if keeps_text else None, token_ids, prediction, media=media))
    return _encode(Prepared(msgspec.Raw(_encode(_without_text(asked))), done))


def _echoed(asked: Any) -> list[Any]:
    """Return short messages in place of those of a request, with the text that its answer repeats (echo)."""
    if isinstance(asked, CohereChatRequest):  # whose kinds of messages are the roles
        return [CohereUserMessage(content="")]
    echoed = getattr(asked, "echoed_text", "")
    return [type(asked.messages[0])(role="assistant" if echoed else "user", content=echoed)]


def _without_text(asked: RequestBody) -> RequestBody:
    """Return the request without the fields that its prompts were made from."""
    changes: dict[str, Any] = {}
    for name in ("prompt", "input", "input_prefix", "input_suffix"):
        if getattr(asked, name, None) is not None:
            changes[name] = ""
    if isinstance(asked, GenerateRequest):
        changes["token_ids"] = [0]
    elif isinstance(asked, GenerativeScoringRequest):
        changes |= {"query": "", "items": []}
    elif isinstance(asked, ChatBatchRequest):
        changes["messages"] = [_echoed(asked.chat(index)) for index in range(len(asked.messages))]
    elif getattr(asked, "messages", None):
        changes["messages"] = _echoed(asked)
    unread = ("chat_template", "chat_template_kwargs", "documents", "system", "prediction", "suffix", "input_extra")
    if isinstance(asked, VectorRequest):
        asked = asked.without_media() if isinstance(asked, PairsRequest) else asked
        return msgspec.structs.replace(asked, **changes)  # responses have documents, and count queries
    if getattr(asked, "prompt_embeds", None) is not None:
        changes |= {"prompt": "", "prompt_embeds": None}
    changes |= {name: None for name in unread if getattr(asked, name, None) is not None}
    return msgspec.structs.replace(asked, **changes)
