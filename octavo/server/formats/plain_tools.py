"""Conversations with tools for chat templates that know of none: the tools stand in the system message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.schema.shim import as_json

_TOOLS = (
    "You may call one or more functions. Their signatures are in JSON between <tools> and </tools>:\n"
    "<tools>\n{}\n</tools>\n"
    "For each call write a JSON object with the name of the function and its arguments between <tool_call> and "
    '</tool_call>:\n<tool_call>\n{{"name": "NAME", "arguments": {{…}}}}\n</tool_call>'
)


def with_tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of the roles system, user and assistant alone, which describe the tools, calls and results."""
    text = _TOOLS.format("\n".join(map(as_json, tools)))
    plain = [_plain(message) for message in messages]
    if plain and plain[0]["role"] == "system":
        plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}".lstrip()}
        return plain
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [f"<tool_call>\n{as_json(call['function'])}\n</tool_call>" for call in message.get("tool_calls") or []]
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    return {**kept, "content": "\n".join([content, *calls] if content else calls or [content])}
