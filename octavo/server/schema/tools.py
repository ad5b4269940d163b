"""Tools in requests: what a model may call, and what it has called in earlier turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

from octavo.core.request_limits import REQUEST_LIMITS, check_entries, check_field
from octavo.errors import InvalidRequest

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")


class Function(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call. parameters: the JSON schema of its arguments. strict: they follow it.

    returned: the schema of what it returns, as transformers describes functions. cache_control: without effect.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returned: dict[str, Any] | None = field(default=None, name="return")
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; there are functions alone. cache_control: without effect."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        function = msgspec.to_builtins(self.function)
        for name in ("strict", "cache_control"):
            function.pop(name, None)
        return {"type": "function", "function": {"description": "", "parameters": {}, **function}}


class NamedFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tool that is to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that was called, with its arguments as JSON."""

    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the call as chat templates read it: the arguments are an object, where they are one."""
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
        arguments = call.function.arguments
        check_field("messages[].tool_calls[].function.arguments", arguments, f"{where}.function.arguments")
        check_field("messages[].tool_call_id", call.id, f"{where}.id")
        check_field("tools[].function.name", call.function.name, f"{where}.function.name")
        num_chars += len(arguments if isinstance(arguments, str) else msgspec.json.encode(arguments))
    return num_chars


def check_tools(tools: Sequence[Tool] | None, choice: str | NamedTool | None) -> None:
    """Raise InvalidRequest for tools that are too many, too large or have no proper name, and for a wrong choice."""
    tools = tools or []
    check_field("tools", [msgspec.to_builtins(tool) for tool in tools])
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name, field = tool.function.name, f"tools[{index}].function.name"
        check_field("tools[].function.name", name, field)
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{field} is {name!r}; it must have letters, digits, dots, dashes and underscores alone", field=field
            )
        if name in names:
            raise InvalidRequest(f"{field} is {name!r}, as that of another tool; rename one of them", field=field)
        names.add(name)
    if choice is None or choice in ("none", "auto"):
        return
    if not tools:
        raise InvalidRequest("tool_choice needs tools; send them, or leave it out", field="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        known = ", ".join(sorted(names))
        raise InvalidRequest(
            f"tool_choice names {choice.function.name!r:.140}, which is none of the tools: {known:.400}",
            field="tool_choice",
        )
