"""The body of `POST /v2/chat`, with Cohere's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused
from octavo.server.schema.chat import REASONING_SWITCHES
from octavo.server.schema.shim import (
    PictureBlock,
    ShimRequest,
    TextBlock,
    as_json,
    called,
    content_of,
    function,
    tagged,
)

_UNCITED = ("OFF", "off", "DISABLED", "disabled")


class CohereThinkingBlock(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """The reasoning of an earlier turn."""

    thinking: str


class CohereImageUrl(Struct, kw_only=True, forbid_unknown_fields=True):
    """Where an image is. detail: it has no effect."""

    url: str
    detail: str | None = None


class CohereImageBlock(PictureBlock, tag="image_url", kw_only=True, forbid_unknown_fields=True):
    """An image."""

    image_url: CohereImageUrl

    def url(self, field: str) -> str:
        return self.image_url.url


class CohereDocument(Struct, kw_only=True, forbid_unknown_fields=True):
    """A document, or a result of a tool. data: its fields, or its text."""

    data: dict[str, Any] | str
    id: str | None = None


class CohereDocumentBlock(Struct, tag_field="type", tag="document", forbid_unknown_fields=True):
    """A document as a result of a tool."""

    document: CohereDocument

    @property
    def text(self) -> str:
        """The text that the chat's message gets in its place."""
        return as_json({"data": self.document.data, **({"id": self.document.id} if self.document.id else {})})


class CohereFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function. arguments: those of a call, as JSON."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str | None = None


class CohereTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool, or with an id a call of it."""

    function: CohereFunction
    type: Literal["function"] = "function"
    id: str = ""


class _CohereMessage(Struct, tag_field="role", kw_only=True, forbid_unknown_fields=True):
    """A message of a conversation."""

    def check(self, field: str) -> int:
        """Return 0: the chat's message made from this one is checked, and its characters are counted there."""
        return 0


class CohereSystemMessage(_CohereMessage, tag="system", kw_only=True, forbid_unknown_fields=True):
    """Instructions."""

    content: str | list[TextBlock]


class CohereUserMessage(_CohereMessage, tag="user", kw_only=True, forbid_unknown_fields=True):
    """A message of the user."""

    content: str | list[TextBlock | CohereImageBlock]


class CohereAssistantMessage(_CohereMessage, tag="assistant", kw_only=True, forbid_unknown_fields=True):
    """A message of the model. tool_plan: reasoning before calls. citations: they have no effect."""

    content: str | list[TextBlock | CohereThinkingBlock] | None = None
    tool_plan: str | None = None
    tool_calls: list[CohereTool] | None = None
    citations: Any = None


class CohereToolMessage(_CohereMessage, tag="tool", kw_only=True, forbid_unknown_fields=True):
    """What a call returned."""

    tool_call_id: str
    content: str | list[TextBlock | CohereDocumentBlock]


if TYPE_CHECKING:
    CohereMessage = CohereSystemMessage | CohereUserMessage | CohereAssistantMessage | CohereToolMessage
else:
    from typing import Union

    CohereMessage = Union[
        (
            *(CohereSystemMessage, CohereUserMessage, CohereAssistantMessage, CohereToolMessage),
            *tagged(CohereSystemMessage, "developer"),
        )
    ]


class CohereCitations(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the text has citations."""

    mode: str | None = None


class CohereForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class CohereThinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons, where its chat template knows `enable_thinking`, `thinking` or `reasoning`.

    token_budget: the most tokens of reasoning of a model that marks it.
    """

    type: Literal["enabled", "disabled"]
    token_budget: Int | None = None


class CohereChatRequest(ShimRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v2/chat`."""

    names: ClassVar[dict[str, str]] = {
        "stop": "stop_sequences",
        "top_k": "k",
        "top_p": "p",
        "thinking_token_budget": "thinking.token_budget",
        "max_completion_tokens": "max_tokens",
    }

    messages: Annotated[list[CohereMessage], Meta(min_length=1)]
    tools: list[CohereTool] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: list[str | CohereDocument] | None = None
    citation_options: CohereCitations | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None = None
    response_format: CohereForm | None = None  # type: ignore[assignment]
    max_tokens: Int | None = None
    stop_sequences: list[str] | None = None
    k: Int | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None

    stop: Annotated[Any, Refused("use stop_sequences")] = None
    top_k: Annotated[Any, Refused("use k")] = None
    top_p: Annotated[Any, Refused("use p")] = None

    def check(self) -> None:
        ShimRequest.check(self)
        mode = None if self.citation_options is None else self.citation_options.mode
        if mode is not None and mode not in _UNCITED:
            raise InvalidRequest(
                f"citation_options.mode is {mode!r:.60}, must be 'OFF': citations are not read from the text",
                field="citation_options.mode",
                code="unsupported_parameter",
            )

    def echoed_messages(self, messages: Sequence[Any]) -> list[Any]:
        return [CohereUserMessage(content="")]  # their kinds are the roles

    def turns(self) -> list[tuple[str, dict[str, Any]]]:
        return [(f"messages[{index}]", _turn(each, f"messages[{index}]")) for index, each in enumerate(self.messages)]

    def chat_fields(self) -> dict[str, Any]:
        form, thinking, kwargs = self.response_format, self.thinking, dict(self.chat_template_kwargs or {})
        fields: dict[str, Any] = {
            "stop": self.stop_sequences,
            "top_k": self.k,
            "top_p": self.p,
            "max_tokens": self.max_tokens,
            "logprobs": self.logprobs,
            "tools": self._chat_tools(),
            "tool_choice": None if self.tool_choice is None else self.tool_choice.lower(),
            "documents": [_document(each, place) for place, each in enumerate(self.documents or [])] or None,
        }
        if self.safety_mode is not None:
            kwargs = {"safety_mode": self.safety_mode.lower(), **kwargs}
        if self.citation_options is not None and self.citation_options.mode is not None:
            kwargs = {"citation_options": {"mode": self.citation_options.mode}, **kwargs}
        if thinking is not None:
            fields["thinking_token_budget"] = thinking.token_budget
            chosen = thinking.type == "enabled"
            kwargs = {**dict.fromkeys((*REASONING_SWITCHES, "reasoning"), chosen), **kwargs}
        if form is not None and form.type == "json_object":
            schema = form.json_schema or form.schema
            named = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
            fields["response_format"] = {"type": "json_object"} if schema is None else named
        return {**fields, "chat_template_kwargs": kwargs or None}

    def tool_places(self) -> list[str]:
        return [f"tools[{index}].function" for index in range(len(self.tools or ()))]

    def _chat_tools(self) -> list[dict[str, Any]] | None:
        strict = self.strict_tools or None
        return [
            function(each.function.name, each.function.description, each.function.parameters, strict)
            for each in self.tools or []
        ] or None


def _turn(message: CohereMessage, field: str) -> dict[str, Any]:
    """Return the message of a chat. Raises InvalidRequest for contents that are not read."""
    match message:
        case CohereToolMessage(tool_call_id=call_id, content=content):
            return {"role": "tool", "tool_call_id": call_id, "content": content_of(content, f"{field}.content")}
        case CohereAssistantMessage():
            parts = [TextBlock(message.content)] if isinstance(message.content, str) else message.content or []
            thoughts = [part.thinking for part in parts if isinstance(part, CohereThinkingBlock)]
            thoughts += [message.tool_plan] if message.tool_plan else []
            texts = [part.text for part in parts if isinstance(part, TextBlock)]
            turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
            if thoughts:
                turn["reasoning_content"] = "\n".join(thoughts)
            if message.tool_calls:
                calls = ((each.id, each.function) for each in message.tool_calls)
                turn["tool_calls"] = [called(call_id, each.name, each.arguments or "{}") for call_id, each in calls]
            return turn
        case CohereUserMessage(content=parts_of_user):
            return {"role": "user", "content": content_of(parts_of_user, f"{field}.content")}
        case _:
            return {"role": "system", "content": content_of(message.content, f"{field}.content")}


def _document(document: str | CohereDocument, place: int) -> dict[str, Any]:
    """Return a document as chat templates of Cohere have it."""
    if isinstance(document, str):
        return {"id": f"doc_{place}", "data": {"text": document}}
    data = document.data if isinstance(document.data, dict) else {"text": document.data}
    return {"id": document.id or f"doc_{place}", "data": data}
