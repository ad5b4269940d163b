"""The body of `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Union

from msgspec import Struct, field

from octavo.core.request_limits import REQUEST_LIMITS, check_entries
from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused, converted, refuse_unsupported
from octavo.server.schema.bodies import TokensBody
from octavo.server.schema.chat import AudioPart, RefusalPart
from octavo.server.schema.common import WRITES_TEXT
from octavo.server.schema.shim import (
    PictureBlock,
    ShimRequest,
    TextBlock,
    Unreadable,
    called,
    content_of,
    function,
    tagged,
    texts_of,
)

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_STORED: Final = Refused("nothing is stored; send the whole input each time")
_UNKNOWN: Final = Refused("the models served here do not know it")
_TEXT_FORMAT: Final = Refused("use text.format")


class InputImage(PictureBlock, tag="input_image", kw_only=True, forbid_unknown_fields=True):
    """An image of a message. detail: without effect."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None

    def url(self, field: str) -> str:
        if self.image_url is None or self.file_id is not None:
            raise InvalidRequest(
                f"{field} has {'no image_url' if self.file_id is None else 'a file_id'}; no files are stored: send the "
                "image as image_url",
                field=field,
            )
        return self.image_url


if TYPE_CHECKING:
    Part = TextBlock | RefusalPart | InputImage | AudioPart | Unreadable
else:
    _TEXTS = tagged(TextBlock, "input_text", "output_text", "reasoning_text", "summary_text")
    _MEDIA = tagged(Unreadable, "input_file")
    Part = Union[(TextBlock, RefusalPart, InputImage, AudioPart, *_TEXTS, *_MEDIA)]


class _Item(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all items. id, status, phase and caller are sent back from earlier responses; they are not read."""

    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    caller: Any = None


class MessageItem(_Item, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class CallItem(_Item, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier turn: `arguments` is the JSON of a function's, `input` the text of a custom tool's."""

    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""
    input: str | None = None


class CallOutputItem(_Item, kw_only=True, forbid_unknown_fields=True):
    """What a call returned."""

    call_id: str
    output: str | list[Part]
    name: str | None = None
    namespace: str | None = None


class ReasoningItem(_Item, kw_only=True, forbid_unknown_fields=True):
    """The reasoning of an earlier turn. Only texts are read: nothing that this server wrote is encrypted."""

    summary: list[Part] = []
    content: list[Part] | None = None
    encrypted_content: str | None = None


_ITEMS: Final[dict[str, type[_Item]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "custom_tool_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


class CustomFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of a custom tool's input: any text, or a text that matches a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    def __post_init__(self) -> None:
        if self.type == "grammar":
            for name in ("syntax", "definition"):
                if getattr(self, name) is None:
                    raise ValueError(f"Object missing required field `{name}`")

    def as_chat(self) -> dict[str, Any]:
        if self.type == "text":
            return {"type": "text"}
        return {"type": "grammar", "grammar": {"syntax": self.syntax, "definition": self.definition}}


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function, or a custom tool, whose input is one text. The fields after `format` have no effect."""

    type: Literal["function", "custom"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    output_schema: Any = None
    defer_loading: bool | None = None
    allowed_callers: Any = None
    is_async: bool | None = field(default=None, name="async")

    def as_chat(self, namespace: str | None) -> dict[str, Any]:
        name = joined_name(namespace, self.name)
        if self.type == "function":
            return function(name, self.description, self.parameters, self.strict)
        given = {"description": self.description, "format": None if self.format is None else self.format.as_chat()}
        return {"type": "custom", "custom": {"name": name, **given}}


class ToolName(Struct, kw_only=True):
    """A tool that a choice names. Clients may send its whole definition, of which the rest is not read."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    def as_chat(self) -> dict[str, Any]:
        return {"type": self.type, self.type: {"name": joined_name(self.namespace, self.name)}}


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool of a namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(Struct, kw_only=True, forbid_unknown_fields=True):
    """How much the model reasons. The response has the reasoning itself, whatever `summary` is."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Annotated[Any, Refused("the template decides what is kept", harmless=("auto",))] = None
    mode: Annotated[Any, Refused(_UNKNOWN.because, harmless=("standard",))] = None


class ResponsesRequest(ShimRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`. Tools that OpenAI runs itself are skipped."""

    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    top_logprobs: Int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    include: list[str] | None = None
    max_tool_calls: Int | None = None
    client_metadata: dict[str, Any] | None = None

    previous_response_id: Annotated[Any, _STORED] = None
    conversation: Annotated[Any, _STORED] = None
    background: Annotated[Any, Refused(_STORED.because, harmless=(False,))] = None
    background_options: Annotated[Any, _STORED] = None
    prompt: Annotated[Any, Refused("no prompts are stored; send input")] = None
    context_management: Annotated[Any, Refused("the input is read as it is sent", harmless=([],))] = None
    truncation: Literal["auto", "disabled"] | None = None
    moderation: Annotated[Any, Refused("the server has no moderation")] = None
    image: Annotated[Any, WRITES_TEXT] = None
    access_programs: Annotated[Any, _UNKNOWN] = None
    enable_response_messages: Annotated[
        Any, Refused("POST /tokenize returns the tokens of a conversation", harmless=(False,))
    ] = None
    previous_input_messages: Annotated[Any, Refused(_STORED.because, harmless=([],))] = None
    max_tokens: Annotated[Any, Refused("use max_output_tokens")] = None
    response_format: Annotated[Any, _TEXT_FORMAT] = None

    def check(self) -> None:
        ShimRequest.check(self)
        if self.reasoning is not None:
            refuse_unsupported(self.reasoning, "reasoning.")

    def turns(self) -> list[tuple[str, dict[str, Any]]]:
        messages: list[tuple[str, dict[str, Any]]] = []
        if self.instructions:
            messages.append(("instructions", {"role": "system", "content": self.instructions}))
        if isinstance(self.input, str):
            return [*messages, ("input", {"role": "user", "content": self.input})]
        check_entries("input", len(self.input), REQUEST_LIMITS["input"].entries)
        for index, given in enumerate(self.input):
            where = f"input[{index}]"
            message = _message(_item(given, where), where)
            if message is None:
                continue
            last = messages[-1][1] if messages else {"role": ""}
            # the reasoning, the text and the calls of one turn are items of their own
            if message["role"] == last["role"] == "assistant" and not _repeats(last, message):
                calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
                last |= message | ({"tool_calls": calls} if calls else {})
            else:
                messages.append((where, message))
        for _, message in messages:
            if message["role"] == "assistant" and "tool_calls" not in message:
                message.setdefault("content", "")
        return messages

    def chat_fields(self) -> dict[str, Any]:
        tools, choice = self._chat_tools()
        return {
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "verbosity": None if self.text is None else self.text.verbosity,
            "logprobs": True if self.wants_logprobs else None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def named_tools(self) -> dict[str, tuple[str | None, FunctionTool]]:
        """Return the tools that the client runs, by the name that the model sees, each with its namespace."""
        named: dict[str, tuple[str | None, FunctionTool]] = {}
        for where, namespace, given in self._client_tools():
            tool = converted(given, FunctionTool, where)
            name = joined_name(namespace, tool.name)
            if name in named:
                raise InvalidRequest(
                    f"{where} has the name {name!r:.140}, as another tool has; rename one", field=where
                )
            named[name] = (namespace, tool)
        return named

    def tool_places(self) -> list[str]:
        return [where for where, _, _ in self._client_tools()]

    def _client_tools(self) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
        """Yield the tools that the client runs: the path of each in the request, its namespace, and the tool as it was
        sent."""
        for index, given in enumerate(self.tools or []):
            where = f"tools[{index}]"
            namespace: Any = None
            members: Any = [(where, given)]
            if given.get("type") == "namespace":
                namespace, tools = given.get("name"), given.get("tools")
                if not isinstance(namespace, str) or not isinstance(tools, list):
                    raise InvalidRequest(f"{where} has no name or no tools", field=where)
                members = [(f"{where}.tools[{number}]", each) for number, each in enumerate(tools)]
            for place, each in members:
                if isinstance(each, dict) and each.get("type") in ("function", "custom"):
                    yield place, namespace, each

    def _chat_tools(self) -> tuple[list[dict[str, Any]], Any]:
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = self._chosen_tools(choice)
        tools = [tool.as_chat(namespace) for namespace, tool in self.named_tools().values()]
        # the tools that were skipped cannot be called
        return tools, None if not tools and choice in ("auto", "none") else choice

    def _chosen_tools(self, choice: dict[str, Any]) -> Any:
        """Return `tool_choice` for the chat, without the tools that OpenAI runs itself: they are not among the chat's
        tools."""
        kind, tools = choice.get("type"), choice.get("tools")
        if kind in ("function", "custom"):
            return converted(choice, ToolName, "tool_choice").as_chat()
        if kind != "allowed_tools" or not isinstance(tools, list):
            raise InvalidRequest(
                f"tool_choice is of type {kind!r:.60}; it is none, auto, required, or of type function, custom or "
                "allowed_tools with tools: the server runs no tools itself",
                field="tool_choice",
                code="unsupported_parameter",
            )
        allowed = [
            converted(each, ToolName, f"tool_choice.tools[{index}]").as_chat()
            for index, each in enumerate(tools)
            if not isinstance(each, dict) or each.get("type") in ("function", "custom")
        ]
        if tools and not allowed and choice.get("mode") == "auto":
            return "none"
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": allowed}}

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


class InputTokens(Struct, frozen=True):
    """Response of `POST /v1/responses/input_tokens`."""

    input_tokens: int
    object: str = "response.input_tokens"


class InputTokensRequest(ResponsesRequest, TokensBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses/input_tokens`: an input; fields about the answer are accepted without effect."""

    def answer(self, preparer: Preparer) -> InputTokens:
        return InputTokens(len(preparer.read(self)[0]))


def _item(given: dict[str, Any], where: str) -> _Item:
    name = given.get("type", "message")
    kind = _ITEMS.get(name) if isinstance(name, str) else None
    if kind is None:
        because = _STORED.because if name == "item_reference" else f"it is one of {', '.join(_ITEMS)}"
        raise InvalidRequest(
            f"{where} is of type {name!r:.60}, which is not supported: {because}",
            field=f"{where}.type",
            code="unsupported_content_type",
        )
    return converted(given, kind, where)


def _message(item: _Item, where: str) -> dict[str, Any] | None:
    """Return the chat's message for an item, or for the part of a message that it is; None for an item without text."""
    match item:
        case MessageItem(role=role, content=content):
            return {"role": role, "content": content_of(content, f"{where}.content")}
        case CallItem(call_id=call_id, name=name):
            call = called(call_id, joined_name(item.namespace, name), item.arguments)
            if item.input is not None:
                custom = {"name": joined_name(item.namespace, name), "input": item.input}
                call = {"id": call_id, "type": "custom", "custom": custom}
            return {"role": "assistant", "tool_calls": [call]}
        case CallOutputItem(call_id=call_id, output=output):
            return {"role": "tool", "tool_call_id": call_id, "content": content_of(output, f"{where}.output")}
        case ReasoningItem(summary=summary, content=texts):
            text = "\n".join(texts_of(texts or summary, f"{where}.content"))
            return {"role": "assistant", "reasoning_content": text} if text else None
    raise AssertionError(item)


def _repeats(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether a message begins a new turn of the assistant rather than going on with the last one."""
    order = ("reasoning_content", "content", "tool_calls")
    begun = max(order.index(name) for name in last if name in order)
    return min(order.index(name) for name in message if name in order) < begun + (begun < 2)
