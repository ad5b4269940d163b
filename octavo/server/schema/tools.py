"""Tools that a model may call, its calls in earlier turns, and its new calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from octavo.core.request_limits import REQUEST_LIMITS, check_entries, check_field
from octavo.errors import InvalidRequest
from octavo.server.formats.events import ReadCall

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")
_MEMBERS: Final = ("function", "custom", "allowed_tools", "grammar")


class _OfType(Struct):
    """An object with the one member that its type names. Anything else raises a ValueError, to which msgspec adds the
    path."""

    def __post_init__(self) -> None:
        kind: str = self.type  # type: ignore[attr-defined]
        for attribute, name in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            is_given = name in _MEMBERS and getattr(self, attribute) is not None
            if is_given and name != kind:
                raise ValueError(f"It is of type {kind} and has {name}")
            if name == kind and not is_given:
                raise ValueError(f"Object missing required field `{name}`")


class Function(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call. parameters: the JSON schema of its arguments. strict: the arguments must match
    it. returned: the schema of the returned value, as transformers describes functions. cache_control: without effect.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returned: dict[str, Any] | None = field(default=None, name="return")
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class InputGrammar(Struct, kw_only=True, forbid_unknown_fields=True):
    """The grammar of a text: a regular expression that it matches as a whole, or rules in Lark's notation."""

    syntax: Literal["lark", "regex"]
    definition: str


class InputFormat(_OfType, kw_only=True, forbid_unknown_fields=True):
    """The form of a custom tool's input: any text, or a text that matches a grammar."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class CustomTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool whose input is one text. cache_control: without effect."""

    name: str
    description: str | None = None
    format: InputFormat | None = None
    cache_control: dict[str, Any] | None = None

    def as_function(self) -> Function:
        """Return the function that the model sees, whose one parameter is `input`: chat templates know no other tools.

        A regular expression is a pattern of it. Rules cannot apply within the JSON of a call: they are added to the
        description.
        """
        description, text = self.description or "", {"type": "string"}
        grammar = None if self.format is None else self.format.grammar
        if grammar is not None:
            description += f"\nThe input follows this grammar ({grammar.syntax}):\n{grammar.definition}"
        is_regex = grammar is not None and grammar.syntax == "regex"
        if grammar is not None and is_regex:
            text["pattern"] = f"^(?:{grammar.definition})$"
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        closed = {**parameters, "additionalProperties": False}
        return Function(name=self.name, description=description, parameters=closed, strict=is_regex)


class Tool(_OfType, kw_only=True, forbid_unknown_fields=True):
    """A function, or a custom tool. cache_control: without effect."""

    type: Literal["function", "custom"] = "function"
    given: Function | None = field(default=None, name="function")
    custom: CustomTool | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def function(self) -> Function:
        if self.custom is not None:
            return self.custom.as_function()
        assert self.given is not None
        return self.given

    def as_dict(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = msgspec.to_builtins(self.function)
        for name in ("strict", "cache_control"):
            function.pop(name, None)
        return {"type": "function", "function": {"description": "", "parameters": {}, **function}}


class NamedFunction(Struct, kw_only=True):
    """The name of a tool. Clients may send its whole definition, of which the rest is not read."""

    name: str


class NamedTool(_OfType, kw_only=True):
    """A tool by its name."""

    type: Literal["function", "custom"] = "function"
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True):
    """Those of the visible tools that may be called. auto: the model may write text instead."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ChosenTools(NamedTool, kw_only=True, forbid_unknown_fields=True):
    """The tool that is to be called, or the tools that may be."""

    type: Literal["function", "custom", "allowed_tools"] = "function"  # type: ignore[assignment]
    allowed_tools: AllowedTools | None = None

    @property
    def mode(self) -> Literal["auto", "required"]:
        return "required" if self.allowed_tools is None else self.allowed_tools.mode

    @property
    def names(self) -> list[str]:
        chosen = [self] if self.allowed_tools is None else self.allowed_tools.tools
        return [named.name for each in chosen if (named := each.function or each.custom) is not None]


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that was called, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] = ""


class CalledCustom(Struct, kw_only=True, forbid_unknown_fields=True):
    """A custom tool that was called, with its input."""

    name: str
    input: str = ""


class FunctionCall(Struct, kw_only=True):
    """The name of a function and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """A call that the model makes."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET

    @classmethod
    def of(cls, call: ReadCall) -> ToolCall:
        if call.is_custom:
            return cls(id=call.id, type="custom", custom=CalledCustom(name=call.name, input=call.arguments))
        return cls(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))


class MessageToolCall(_OfType, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    given: CalledFunction | None = field(default=None, name="function")
    custom: CalledCustom | None = None
    index: int | None = None

    @property
    def function(self) -> CalledFunction:
        if self.custom is not None:
            return CalledFunction(name=self.custom.name, arguments={"input": self.custom.input})
        assert self.given is not None
        return self.given

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat templates read it: with arguments as an object if their JSON is one."""
        arguments: Any = self.function.arguments or {}
        if isinstance(arguments, str):
            try:
                found = msgspec.json.decode(arguments)
            except (msgspec.DecodeError, RecursionError):
                found = None
            arguments = found if isinstance(found, dict) else arguments
        call = {} if self.id is None else {"id": self.id}
        return {**call, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def check_calls(calls: Sequence[MessageToolCall], field: str) -> int:
    """Return how many characters the calls of a message have. Raises InvalidRequest, which names `field`."""
    check_entries(f"{field}.tool_calls", len(calls), REQUEST_LIMITS["messages[].tool_calls"].entries)
    num_chars = 0
    for index, call in enumerate(calls):
        where = f"{field}.tool_calls[{index}]"
        arguments = call.function.arguments if call.custom is None else call.custom.input
        name = "function.arguments" if call.custom is None else "custom.input"
        check_field("messages[].tool_calls[].function.arguments", arguments, f"{where}.{name}")
        check_field("messages[].tool_call_id", call.id, f"{where}.id")
        check_field("tools[].function.name", call.function.name, f"{where}.{call.type}.name")
        num_chars += len(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments))
    return num_chars


def check_tools(tools: Sequence[Tool] | None, choice: str | ChosenTools | None) -> None:
    """Raise InvalidRequest for tools that are too many, too large or have no proper name, and for a wrong choice."""
    tools = tools or []
    check_field("tools", [msgspec.to_builtins(tool) for tool in tools])
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name, field = tool.function.name, f"tools[{index}].{tool.type}.name"
        check_field("tools[].function.name", name, field)
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{field} is {name!r}; it may have only letters, digits, dots, dashes and underscores", field=field
            )
        if name in names:
            raise InvalidRequest(
                f"{field} is {name!r}, which is the name of another tool, too; rename one", field=field
            )
        names.add(name)
    if choice is None or choice in ("none", "auto"):
        return
    if not tools:
        raise InvalidRequest("tool_choice needs tools; send them, or leave it out", field="tool_choice")
    if not isinstance(choice, ChosenTools):
        return
    if not choice.names:
        raise InvalidRequest("tool_choice allows no tools; name some, or set it to none", field="tool_choice")
    for name in choice.names:
        if name not in names:
            known = ", ".join(sorted(names))
            raise InvalidRequest(
                f"tool_choice names {name!r:.140}, which is not among the tools: {known:.400}", field="tool_choice"
            )
