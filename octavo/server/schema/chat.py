"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from octavo.core.prompt import Prompt, checked_text
from octavo.core.request_limits import REQUEST_LIMITS, check_entries, check_field
from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused, refuse_unsupported
from octavo.server.schema.common import WRITES_TEXT, GenerationRequest
from octavo.server.schema.tools import ChosenTools, MessageToolCall, Tool, check_calls, check_tools

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_FUNCTIONS = Refused("it is the older form; send tools and tool_choice", harmless=([], "none"))
_PREFIX: Final = Refused("set continue_final_message to true and add_generation_prompt to false", harmless=(False,))
_KEYWORDS: Final = 'Further values for the chat template, such as {"enable_thinking": false}.'
_EFFORT: Final = "How long the model reasons, such as low or high, where its chat template reads this."
REASONING_SWITCHES: Final = ("enable_thinking", "thinking")
"""The names by which chat templates ask whether the model reasons."""
_BUDGET: Final = "Tokens after which reasoning ends; -1 is no limit."


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A piece of text in a message. The other fields are marks for caches, without effect."""

    text: str
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """An assistant's refusal in an earlier turn; it is text like any other."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class _OtherPart(Struct, tag_field="type"):
    text: ClassVar[str] = ""


class MediaPart(_OtherPart, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a message that the model reads and that is no text."""

    def as_dict(self) -> dict[str, Any]:
        """Return the part as it was sent."""
        part: dict[str, Any] = msgspec.to_builtins(self)
        return part


class ImageUrl(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Where an image is: a data: URL. detail, uuid: without effect."""

    url: str
    detail: str | None = None
    uuid: str | None = None


class ImagePart(MediaPart, tag="image_url"):
    """An image in a message. uuid, cache_control: without effect."""

    image_url: ImageUrl | str
    uuid: str | None = None
    cache_control: dict[str, Any] | None = None


class VideoUrl(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The frames of a video as data:video/jpeg;base64,FIRST,SECOND,…, and how many of them are of one second."""

    url: str
    fps: float | None = None


class VideoPart(MediaPart, tag="video_url"):
    """A video in a message."""

    video_url: VideoUrl | str


class InputAudio(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A sound: base64 of a file. format: without effect, it is known from the file."""

    data: str
    format: str | None = None


class AudioPart(MediaPart, tag="input_audio"):
    """A sound in a message."""

    input_audio: InputAudio


class EmbedsPart(MediaPart, tag="prompt_embeds"):
    """Vectors in place of tokens, [tokens, width]: a file of numpy (.npy) in Base64."""

    data: str


class AudioUrlPart(_OtherPart, tag="audio_url"):
    """The URL of a sound; it is not fetched."""


class FilePart(_OtherPart, tag="file"):
    """A file, which is not read."""


ContentPart = TextPart | RefusalPart | ImagePart | VideoPart | AudioPart | EmbedsPart | AudioUrlPart | FilePart


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation: a role and its text.

    annotations, cache_control, provider_specific_fields: fields that other servers and clients write; without effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    function_call: Annotated[Any, _FUNCTIONS] = None
    audio: Annotated[Any, WRITES_TEXT] = None
    prefix: Annotated[Any, _PREFIX] = None
    thinking_blocks: Annotated[Any, Refused("send the text of the blocks as reasoning_content", harmless=([],))] = None

    def check(self, field: str) -> int:
        """Return the number of the message's characters. Raises InvalidRequest, which names `field`, when a part is too
        long."""
        parts = self.content if isinstance(self.content, list) else []
        check_entries(f"{field}.content", len(parts), REQUEST_LIMITS["messages[].content"].entries)
        for name in ("annotations", "cache_control", "provider_specific_fields"):
            check_field(f"messages[].{name}", getattr(self, name), f"{field}.{name}")
        num_chars = sum(len(part.text) for part in parts) + check_calls(self.tool_calls or [], field)
        for name in ("content", "refusal", "reasoning_content", "reasoning", "name", "tool_call_id"):
            text = getattr(self, name)
            if isinstance(text, str):
                check_field(f"messages[].{name}", text, f"{field}.{name}")
                num_chars += len(text)
        return num_chars

    def as_dict(self, field: str) -> dict[str, Any]:
        """Return the message as a chat template reads it. Raises InvalidRequest, which names `field`."""
        refuse_unsupported(self, f"{field}.")
        # developer is the newer word for system; templates know the older one
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self._content(f"{field}.content")
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        given["reasoning_content"] = self.reasoning if self.reasoning_content is None else self.reasoning_content
        message |= {name: value for name, value in given.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message

    @property
    def has_images(self) -> bool:
        """Whether a part of the message is an image, a video, a sound or vectors."""
        return isinstance(self.content, list) and any(isinstance(part, MediaPart) for part in self.content)

    def _content(self, field: str) -> str | list[dict[str, Any]]:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.refusal is not None:
                return self.refusal
            # other servers return no content where the output ends within the reasoning, which many clients leave out
            if self.role == "assistant":
                return ""
            raise InvalidRequest(f"{field} is missing; give text", field=field, code="missing_required_parameter")
        for index, part in enumerate(self.content):
            if isinstance(part, AudioUrlPart | FilePart):
                kind = part.__struct_config__.tag
                raise InvalidRequest(
                    f"{field}[{index}] is of type {kind}; text, image_url, video_url, input_audio and prompt_embeds "
                    "are read",
                    field=f"{field}[{index}]",
                    code="unsupported_content_type",
                )
        if not self.has_images:
            return "\n".join(part.text for part in self.content)
        return [
            part.as_dict() if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
            for part in self.content
        ]


class Prediction(Struct, tag_field="type", tag="content", forbid_unknown_fields=True):
    """The probable output, as guesses for an engine that speculates."""

    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description=_KEYWORDS)] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Annotated[str, Meta(description=_EFFORT)] | None = None
    verbosity: str | None = None
    echo: bool | None = None
    prediction: Prediction | None = None

    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Annotated[bool, Meta(description="Return the reasoning, not only the answer.")] | None = None
    separate_reasoning: Annotated[bool, Meta(description="Part reasoning from the text of the answer.")] | None = None
    stream_reasoning: Annotated[bool, Meta(description="Stream reasoning; false sends it in one piece.")] | None = None
    thinking_token_budget: Annotated[Int, Meta(description=_BUDGET)] | None = None

    functions: Annotated[Any, _FUNCTIONS] = None
    function_call: Annotated[Any, _FUNCTIONS] = None
    audio: Annotated[Any, WRITES_TEXT] = None
    modalities: Annotated[Any, Refused(WRITES_TEXT.because, harmless=(["text"],))] = None
    moderation: Annotated[Any, Refused("the server does not judge texts")] = None
    web_search_options: Annotated[Any, Refused("the server does not search the web")] = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs to be true", field="logprob_token_ids")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; give one",
                field="max_tokens",
            )
        budget = self.thinking_token_budget
        if budget == -1:
            self.thinking_token_budget = None
        elif budget is not None and budget < 0:
            raise InvalidRequest(
                f"thinking_token_budget is {budget}, must be at least 0; leave it out for no limit",
                field="thinking_token_budget",
            )
        check_tools(self.tools, self.tool_choice)

    @property
    def call_mode(self) -> Literal["none", "auto", "required"]:
        """Whether the response has no calls, may have some, or must be calls."""
        choice = self.tool_choice
        return choice.mode if isinstance(choice, ChosenTools) else choice or "auto"

    @property
    def must_call(self) -> bool:
        return bool(self.tools) and self.call_mode == "required"

    @property
    def calls_once(self) -> bool:
        """Whether the response has at most one call: also where `tool_choice` names a tool, as in OpenAI's API."""
        choice = self.tool_choice
        is_named = isinstance(choice, ChosenTools) and choice.allowed_tools is None
        return is_named or self.parallel_tool_calls is False

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that `tool_choice` allows to call."""
        if not isinstance(self.tool_choice, ChosenTools):
            return self.tools or []
        names = set(self.tool_choice.names)
        return [tool for tool in self.tools or [] if tool.function.name in names]

    @property
    def constrains_calls(self) -> bool:
        """Return whether calls need a grammar: if the request demands calls, a tool is strict, or `tool_choice` allows
        only some of the tools that the model sees."""
        is_strict = isinstance(self.tool_choice, ChosenTools) or any(
            tool.function.strict for tool in self.callable_tools
        )
        return self.must_call or (self.call_mode == "auto" and is_strict)

    @property
    def may_take_long(self) -> bool:
        return super().may_take_long or self.constrains_calls

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        preparer.tools.vectors.refuse_text()
        self.check_form()
        preparer.format.check(self)
        prompt = preparer.rendered(self)
        if self.prediction is not None:
            prompt = msgspec.structs.replace(prompt, prediction=checked_text(self.prediction.text, "prediction"))
        return [prompt]

    def template_values(self, efforts: Mapping[str, str]) -> dict[str, Any] | None:
        """Values for the chat template besides the messages; chat_template_kwargs override fields of the same name.

        efforts: what the template gets in place of a `reasoning_effort`. Templates that only know whether the model
        reasons are told that, too.
        """
        names = ("documents", "reasoning_effort", "verbosity")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.reasoning_effort is not None:
            effort = given["reasoning_effort"] = efforts.get(self.reasoning_effort, self.reasoning_effort)
            given |= dict.fromkeys(REASONING_SWITCHES, effort != "none")
        return {**given, **(self.chat_template_kwargs or {})} if given else self.chat_template_kwargs

    @property
    def echoed_text(self) -> str:
        """Return the text to echo before the model's own: with `echo`, the begin of the answer that the request
        gave."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant" or last.content is None:
            return ""
        content = last.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content if part.text)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
