"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Union

from msgspec import Meta, Struct

from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused, refuse_unsupported
from octavo.server.schema.bodies import TokensBody
from octavo.server.schema.chat import REASONING_SWITCHES
from octavo.server.schema.shim import (
    PictureBlock,
    ShimRequest,
    TextBlock,
    Unreadable,
    as_json,
    called,
    content_of,
    function,
    joined,
    part_of,
    tagged,
    texts_of,
)

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_UNSTABLE_HEADER: Final = "x-anthropic-billing-header:"
"""Claude Code begins a block of the system prompt with it and a number that changes with each request, so the block is
left out: it would make every look-up in the prefix cache miss."""


class _Block(Struct, tag_field="type", kw_only=True, forbid_unknown_fields=True):
    """Fields of all blocks. None has an effect: the prefix cache works without marks."""

    cache_control: Any = None
    caller: Any = None
    toolset_name: str | None = None


class ThinkingBlock(_Block, tag="thinking", kw_only=True, forbid_unknown_fields=True):
    """The reasoning of an earlier turn. signature: it is not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking", kw_only=True, forbid_unknown_fields=True):
    """Encrypted reasoning; it is left out."""

    data: str


class ToolUseBlock(_Block, tag="tool_use", kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier turn."""

    id: str
    name: str
    input: dict[str, Any]


class Source(Struct, kw_only=True, forbid_unknown_fields=True):
    """Where an image is."""

    type: Literal["base64", "url", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(PictureBlock, tag="image", kw_only=True, forbid_unknown_fields=True):
    """An image."""

    source: Source
    cache_control: Any = None

    def url(self, field: str) -> str:
        source = self.source
        if source.type == "base64" and source.data is not None:
            return f"data:{source.media_type or 'image/png'};base64,{source.data}"
        if source.type == "url" and source.url is not None:
            return source.url
        missing = {"base64": "has no data", "url": "has no url"}.get(source.type, "is a file, and no files are stored")
        raise InvalidRequest(f"{field}.source {missing}; send the image as base64", field=f"{field}.source")


if TYPE_CHECKING:
    ResultBlock = TextBlock | ImageBlock | Unreadable
else:
    ResultBlock = Union[(TextBlock, ImageBlock, *tagged(Unreadable, "document", "search_result", "tool_reference"))]


class ToolResultBlock(_Block, tag="tool_result", kw_only=True, forbid_unknown_fields=True):
    """What a call returned. is_error: the text is expected to say so."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


if TYPE_CHECKING:
    Block = TextBlock | ImageBlock | Unreadable | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
else:
    _UNREADABLE = tagged(
        Unreadable,
        *("document", "search_result", "container_upload", "server_tool_use", "web_search_tool_result"),
        *("web_fetch_tool_result", "code_execution_tool_result"),
    )
    _BLOCKS = (TextBlock, ImageBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, ToolResultBlock)
    Block = Union[(*_BLOCKS, *_UNREADABLE)]


class InputMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    thinking_blocks: Annotated[Any, Refused("send the blocks as parts of content", harmless=([],))] = None

    def check(self, field: str) -> int:
        """Return 0: the chat's message made from this one is checked, and its characters are counted there."""
        refuse_unsupported(self, f"{field}.")
        return 0


class MessagesTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs. The fields that follow `type` have no effect."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Any = None
    allowed_callers: Any = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model calls tools: `auto` as it likes, `any` at least one, `tool` the tool `name`, `none` none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons, where its chat template asks for it. adaptive: as the template has it.

    budget_tokens: the most tokens of reasoning of a model that marks it.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text, and how much the model reasons."""

    format: OutputFormat | None = None
    effort: str | None = None
    task_budget: Annotated[Any, Refused("the client counts what a task takes")] = None


class MessageMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    """user_id: the user, as in the field `user` of chats."""

    user_id: str | None = None


class ConversationRequest(ShimRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields of both requests."""

    names: ClassVar[dict[str, str]] = {
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "stop": "stop_sequences",
        "user": "metadata.user_id",
        "parallel_tool_calls": "tool_choice",
        "thinking_token_budget": "thinking.budget_tokens",
        "tools[].parameters": "input_schema",
    }

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    metadata: MessageMetadata | None = None  # type: ignore[assignment]

    speed: str | None = None
    inference_geo: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    context_management: dict[str, Any] | None = None

    thread: dict[str, Any] | None = None
    container: Annotated[Any, Refused("the server has no containers")] = None
    mcp_servers: Annotated[Any, Refused("the server runs no tools itself", harmless=([],))] = None
    diagnostics: Annotated[Any, Refused("ask for return_cache_info in a chat")] = None
    stop: Annotated[Any, Refused("use stop_sequences")] = None
    response_format: Annotated[Any, Refused("use output_config.format")] = None

    def check(self) -> None:
        ShimRequest.check(self)
        if self.thread is not None:
            raise InvalidRequest(
                "thread is not supported: nothing is stored; send the whole conversation each time",
                field="thread",
                code="thread_unsupported_request",
            )
        if self.output_config is not None:
            refuse_unsupported(self.output_config, "output_config.")

    def turns(self) -> list[tuple[str, dict[str, Any]]]:
        turns: list[tuple[str, dict[str, Any]]] = []
        if self.system:
            texts = texts_of(self.system, "system")
            text = "\n".join(text for text in texts if not text.startswith(_UNSTABLE_HEADER))
            turns.append(("system", {"role": "system", "content": text}))
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            turns += [(where, turn) for turn in _turns(message, f"{where}.content")]
        return turns

    def chat_fields(self) -> dict[str, Any]:
        choice, thinking, output = self.tool_choice, self.thinking, self.output_config
        fields: dict[str, Any] = {
            "stop": self.stop_sequences,
            "user": self.user if self.metadata is None else self.metadata.user_id,
            "tools": self._chat_tools(),
        }
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if thinking is not None and thinking.type in ("enabled", "disabled"):
            fields["thinking_token_budget"] = thinking.budget_tokens
            chosen = dict.fromkeys(REASONING_SWITCHES, thinking.type == "enabled")
            fields["chat_template_kwargs"] = chosen | (self.chat_template_kwargs or {})
        if output is not None:
            fields["reasoning_effort"] = output.effort
            if output.format is not None:
                form = {"name": "output", "schema": output.format.schema, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": form}
        if self.messages[-1].role == "assistant":
            # the response goes on with the last message
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields

    def tool_places(self) -> list[str]:
        return [f"tools[{index}]" for index in range(len(self.tools or ()))]

    def _chat_tools(self) -> list[dict[str, Any]] | None:
        for index, tool in enumerate(self.tools or []):
            if tool.type not in (None, "custom"):
                raise InvalidRequest(
                    f"tools[{index}] is of type {tool.type!r:.60}; the server runs no tools itself, and knows "
                    "tools of the client by their input_schema alone",
                    field=f"tools[{index}].type",
                    code="unsupported_parameter",
                )
        return [
            function(tool.name, tool.description, tool.input_schema, tool.strict) for tool in self.tools or []
        ] or None


class TokenCount(Struct, frozen=True):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class CountTokensRequest(ConversationRequest, TokensBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`: a conversation; sampling parameters are accepted without effect."""

    def answer(self, preparer: Preparer) -> TokenCount:
        return TokenCount(len(preparer.read(self)[0]))


class MessagesRequest(ConversationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages`."""

    max_tokens: Int


def _turns(message: InputMessage, field: str) -> list[dict[str, Any]]:
    """Return the chat's messages for one message of this API: results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    turns: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        where = f"{field}[{index}]"
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                calls.append(called(block.id, block.name, as_json(block.input)))
            case ToolResultBlock():
                content = content_of(block.content or "", f"{where}.content")
                turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case _:
                parts.append(part_of(block, where))
    if parts or thoughts or calls or not turns:
        turn: dict[str, Any] = {"role": message.role, "content": joined(parts)}
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
        turns.append(turn)
    return turns
