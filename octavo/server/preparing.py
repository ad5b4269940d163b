"""Makes prompts from requests, in the server's process or in a helper process, which sends them back encoded."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import msgspec

from octavo.config.server_args import ServerArgs
from octavo.core.media import MediaInput
from octavo.core.prompt import Prompt
from octavo.engine.input.input_processor import InputProcessor, InputSetup
from octavo.engine.input.vector_input import num_unseen_of
from octavo.engine.text.chat_template import ChatOptions
from octavo.engine.text.template_budget import RenderLimits
from octavo.errors import InvalidRequest
from octavo.multimodal.media_urls import MustReadElsewhere
from octavo.server.formats.format import AUTO
from octavo.server.formats.reading import ModelFormat
from octavo.server.schema.bodies import PromptBody, TokensBody
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.completions import CompletionRequest
from octavo.server.schema.tokens import TextRequest
from octavo.server.schema.tools import Tool
from octavo.server.schema.vectors import InputRequest, VectorRequest

_PROMPTS: Final = ("prompt_embeds", "messages", "input", "prompt")
"""The fields that prompts are made of; a request has one of them."""

T = TypeVar("T")

_encode: Final = msgspec.msgpack.Encoder().encode


class TextPolicy(msgspec.Struct, frozen=True):
    """What requests may do. The fields are the server's arguments of the same names."""

    trust_request_chat_template: bool = False
    allow_special_tokens_in_content: bool = False
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    reasoning_effort_map: dict[str, str] = {}
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
    """What bodies of requests make their prompts with, and their responses about tokens."""

    tools: InputProcessor
    policy: TextPolicy
    limits: RenderLimits | None = None
    """What the rendering of a template may cost."""
    most_s: float | None = None
    """Seconds of processor time after which a request with several prompts is left to a process for long jobs; None:
    never."""

    @cached_property
    def format(self) -> ModelFormat:
        policy, tools = self.policy, self.tools
        parsers = policy.tool_call_parser, policy.reasoning_parser
        return ModelFormat(tools.tokenizer_info, tools.tokenizer, parsers, allows_auto=policy.enable_auto_tool_choice)

    def read(self, asked: PromptBody) -> tuple[list[int], Sequence[MediaInput]]:
        """Return the tokens of a request with one prompt, and its images and sounds. Raises InvalidRequest."""
        [prompt] = asked.prompts(self)
        tokens = prompt.token_ids or self.tools.tokenizer.encode(
            prompt.text or "", prompt.add_special_tokens, prompt.cuts
        )
        return self.tools.media.read(prompt, tokens) if prompt.multi_modal_data else (tokens, ())

    def response(self, asked: TokensBody) -> TokensResponse:
        """Return the response of an endpoint about tokens. Raises InvalidRequest."""
        return TokensResponse(asked.model, msgspec.json.encode(asked.answer(self)))

    def in_time(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. Raises MustReadElsewhere when that has taken more than `most_s`."""
        began = time.process_time()
        for item in items:
            yield item
            if self.most_s is not None and time.process_time() - began > self.most_s:
                raise MustReadElsewhere(fetches=False)

    def rendered(self, asked: ChatCompletionRequest | TextRequest | InputRequest, *, opens_turn: bool = True) -> Prompt:
        """Return the prompt that the model's chat template makes of the messages. Raises InvalidRequest.

        opens_turn: whether the prompt ends with the begin of a turn of the model, unless the request sets it.
        """
        if asked.chat_template is not None and not self.policy.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template is a program, and this server runs none from requests; leave it out, or start the "
                "server with --trust-request-chat-template",
                field="chat_template",
                code="unsupported_parameter",
            )
        values = asked.chat_template_kwargs
        if isinstance(asked, ChatCompletionRequest):
            values = asked.template_values(self.policy.reasoning_effort_map)
        continues, opens = bool(asked.continue_final_message), asked.add_generation_prompt
        options = ChatOptions(
            add_generation_prompt=opens_turn and not continues if opens is None else opens,
            continue_final_message=continues,
            chat_template=asked.chat_template,
            chat_template_kwargs=values,
            allow_special_tokens_in_content=self.policy.allow_special_tokens_in_content,
        )
        messages = [message.as_dict(f"messages[{index}]") for index, message in enumerate(asked.messages or [])]
        leaves_out = self.policy.exclude_tools_when_tool_choice_none and getattr(asked, "tool_choice", None) == "none"
        given: list[Tool] | None = getattr(asked, "tools", None)
        num_given = len(messages)
        if given and not leaves_out:
            messages, tools = self.format.with_tools(messages, [tool.as_dict() for tool in given])
            options = msgspec.structs.replace(options, tools=tools)
        prompt = self._counted(messages, options, len(messages) - num_given)
        if asked.add_special_tokens is None:
            return prompt
        return msgspec.structs.replace(prompt, add_special_tokens=asked.add_special_tokens)

    def _counted(self, messages: list[dict[str, Any]], options: ChatOptions, num_before: int) -> Prompt:
        """Return the prompt of a conversation; errors and places of images count messages as the client does, without
        the first `num_before`, which describe tools. Raises InvalidRequest."""
        try:
            prompt = self.tools.render_chat(messages, options, self.limits)
        except InvalidRequest as error:
            if num_before:
                error.args = (_later(str(error), num_before),)
                error.field = None if error.field is None else _later(error.field, num_before)
            raise
        if not num_before or not prompt.media_places:
            return prompt
        places = {kind: [_later(each, num_before) for each in found] for kind, found in prompt.media_places.items()}
        return msgspec.structs.replace(prompt, media_places=places)


def _later(text: str, num_before: int) -> str:
    """Return a text about messages for a reader who does not have the first `num_before` of them."""
    return _MESSAGE.sub(lambda found: f"messages[{max(0, int(found[1]) - num_before)}]", text)


_MESSAGE: Final = re.compile(r"\bmessages\[(\d+)\]")


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
    """What a helper process makes of a request: the request without its text as JSON, which has integers of any size,
    as schemas of tools do, and its prompts."""

    asked: bytes
    prompts: list[PreparedPrompt]


def prepared(asked: PromptBody, prompts: Sequence[Prompt], preparer: Preparer) -> bytes:
    """Return an encoded `Prepared`. Raises InvalidRequest."""
    tools = preparer.tools
    keeps_text = isinstance(asked, CompletionRequest) and bool(asked.echo)
    num_kept = getattr(asked, "truncate_prompt_tokens", None)
    done = []
    for index, prompt in enumerate(preparer.in_time(prompts)):
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
            names = (asked.texts_field, *_PROMPTS)
            is_listed = len(prompts) > 1 and getattr(asked, "lists_prompts", False)
            if is_listed or not (error.field or "").startswith("messages["):
                error.field = next((name for name in names if getattr(asked, name, None) is not None), None)
            if is_listed:
                error.field = f"{error.field}[{index}]"
                error.args = (f"{error.field}: {error}",)
            raise
        done.append(PreparedPrompt(prompt.text if keeps_text else None, token_ids, prediction, media=media))
    return _encode(Prepared(msgspec.json.encode(asked.without_text()), done))
