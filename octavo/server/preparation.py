"""From a checked request to prompts, and the responses of /tokenize and /detokenize: work that needs no engine.

It runs in the server's process for small requests and in a helper process (`text_process`) for all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from octavo.core.messages import CoreReady
from octavo.core.prompt import Prompt
from octavo.engine.chat_template import ChatOptions
from octavo.engine.template_budget import RenderLimits
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server import schema
from octavo.server.decode import RequestBody
from octavo.server.errors import ApiError
from octavo.server.responses import DetokenizeResponse, TokenizeResponse
from octavo.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    PrefixRequest,
    TokenizeRequest,
)

_encode: Final = msgspec.msgpack.Encoder().encode

REQUESTS: Mapping[str, type[RequestBody]] = {
    name: kind for name, kind in vars(schema).items() if isinstance(kind, type) and issubclass(kind, RequestBody)
}
"""The bodies that `octavo.server.schema` has, by name: a process for text reads any of them."""


class TextPolicy(msgspec.Struct, frozen=True):
    """What requests may do: the server's arguments of the same names."""

    trust_request_chat_template: bool = False
    allow_special_tokens_in_content: bool = False


class TextTools(Protocol):
    """The tools that prompts are made with; `AsyncLLM` and `InputProcessor` have them."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def ready(self) -> CoreReady: ...

    def render_chat(
        self, messages: Sequence[Any], options: ChatOptions | None = None, limits: RenderLimits | None = None
    ) -> Prompt: ...


@dataclass(frozen=True)
class Preparer:
    """Makes prompts, and responses about tokens. Every method raises InvalidRequest or ApiError for a wrong request."""

    tools: TextTools
    model_names: tuple[str, ...]
    policy: TextPolicy

    def prompts(self, asked: RequestBody, limits: RenderLimits | None = None) -> list[Prompt]:
        """Return the prompts of a request, not tokenised yet. limits: what rendering may cost."""
        if isinstance(asked, CompletionRequest):
            adds = asked.add_special_tokens is not False
            return [
                Prompt(text=prompt, add_special_tokens=adds) if isinstance(prompt, str) else Prompt(token_ids=prompt)
                for prompt in asked.prompts()
            ]
        if isinstance(asked, ChatCompletionRequest):
            prompt = self._rendered(asked, limits)
        else:
            assert isinstance(asked, PrefixRequest | TokenizeRequest)
            prompt = self._prompt_or_messages(asked, limits)
        if asked.add_special_tokens is None:
            return [prompt]
        return [msgspec.structs.replace(prompt, add_special_tokens=asked.add_special_tokens)]

    def answer(self, asked: TokenizeRequest | DetokenizeRequest, limits: RenderLimits | None = None) -> bytes:
        """Return the encoded response of /tokenize or /detokenize. limits: what rendering may cost."""
        if isinstance(asked, DetokenizeRequest):
            return self._detokenized(asked)
        tokenizer = self.tools.tokenizer
        [prompt] = self.prompts(asked, limits)
        tokens = tokenizer.encode(prompt.text or "", prompt.add_special_tokens, prompt.cuts)
        return msgspec.json.encode(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=self.tools.ready.max_model_len,
                tokens=tokens,
                token_strs=[*map(tokenizer.token_text, tokens)] if asked.return_token_strs else None,
            )
        )

    def _detokenized(self, asked: DetokenizeRequest) -> bytes:
        served_name(asked.model, self.model_names)
        vocab_size = self.tools.ready.vocab_size
        for position, token_id in enumerate(asked.tokens):
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"tokens[{position}] is {token_id}; the model's token ids go from 0 to {vocab_size - 1}",
                    field=f"tokens[{position}]",
                )
        text = self.tools.tokenizer.decode(asked.tokens, asked.skip_special_tokens)
        return msgspec.json.encode(DetokenizeResponse(prompt=text))

    def _prompt_or_messages(self, asked: PrefixRequest | TokenizeRequest, limits: RenderLimits | None) -> Prompt:
        served_name(asked.model, self.model_names)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if asked.messages is not None:
            # in prompts that begin with a prefix, other messages follow it, not the model's turn
            return self._rendered(asked, limits, opens_turn=isinstance(asked, TokenizeRequest))
        return Prompt(text=asked.prompt) if isinstance(asked.prompt, str) else Prompt(token_ids=asked.prompt)

    def _rendered(
        self,
        asked: ChatCompletionRequest | TokenizeRequest | PrefixRequest,
        limits: RenderLimits | None,
        *,
        opens_turn: bool = True,
    ) -> Prompt:
        """Return the prompt that the model's chat template makes of the messages.

        opens_turn: whether a turn of the model is opened behind them, if the request does not set it.
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
            chat_template_kwargs=asked.chat_template_kwargs,
            allow_special_tokens_in_content=self.policy.allow_special_tokens_in_content,
        )
        messages = [message.as_dict(f"messages[{index}]") for index, message in enumerate(asked.messages or [])]
        return self.tools.render_chat(messages, options, limits)


def served_name(asked: str | None, served: Sequence[str]) -> str:
    """Return the name by which a client asks for the model; the first one where it gives none. Raises ApiError 404."""
    if asked and asked not in served:
        raise ApiError(
            404,
            f"the model {asked[:200]!r} is not served here; served: {', '.join(served)}",
            param="model",
            code="model_not_found",
        )
    return asked or served[0]


class PreparedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A tokenised prompt. token_ids: 4 bytes each, in the byte order of the machine."""

    text: str | None
    token_ids: bytes


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """What a helper process makes of a request: the request without its text, and its prompts."""

    asked: msgspec.Raw
    prompts: list[PreparedPrompt]


def prepared(asked: RequestBody, prompts: Sequence[Prompt], tokenise: Callable[[Prompt], list[int]]) -> bytes:
    """Return an encoded `Prepared`. Raises InvalidRequest."""
    keeps_text = bool(getattr(asked, "echo", None))
    done = []
    for prompt in prompts:
        try:
            token_ids = array("i", tokenise(prompt)).tobytes()
        except InvalidRequest as error:
            error.field = "prompt" if getattr(asked, "messages", None) is None else "messages"
            raise
        done.append(PreparedPrompt(prompt.text if keeps_text else None, token_ids))
    return _encode(Prepared(msgspec.Raw(_encode(_without_text(asked))), done))


def _without_text(asked: RequestBody) -> RequestBody:
    """Return the request without what its prompts were made of."""
    changes: dict[str, Any] = {}
    if getattr(asked, "prompt", None) is not None:
        changes["prompt"] = ""
    if getattr(asked, "messages", None) is not None:
        changes["messages"] = [Message(role="user", content="")]
    if isinstance(asked, ChatCompletionRequest | PrefixRequest):
        changes |= {"chat_template": None, "chat_template_kwargs": None}
    return msgspec.structs.replace(asked, **changes)
