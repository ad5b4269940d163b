"""A format: the marks of reasoning and of calls. It is a table in the shape of Hugging Face's response templates."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from octavo.errors import ConfigError, suggestion
from octavo.server.formats.marks import Mark, pieces_of

AUTO: Final = "auto"
NONE: Final = "none"

_log = logging.getLogger(__name__)

Content = Literal["json", "call", "tags", "pythonic"]


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of reasoning. repeats: it may come again after other text. then: a mark before what follows it."""

    opens: tuple[Mark, ...]
    closes: tuple[Mark, ...]
    repeats: bool = False
    then: str = ""


@dataclass(frozen=True)
class TagFormat:
    """An argument of a call: the mark before its value, with the group `key`, and the mark behind it."""

    open: Mark
    close: Mark


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    content: what is between the marks: `json`, the arguments alone, with the name in the mark; `call`, objects with
    name and arguments, alone or in a list; `tags`, each argument between tags; `pythonic`, a list of Python calls.
    begin, end: marks around all calls of a turn. separator: what stands between two calls. is_bare: the calls may be
    the whole text, without a mark. id_chars: how many letters and digits an id has, 0 for OpenAI's form.
    """

    opens: tuple[Mark, ...]
    closes: tuple[Mark, ...] = ()
    content: Content = "call"
    name_key: str = "name"
    arguments_key: str = "arguments"
    tag: TagFormat | None = None
    is_list: bool = False
    begin: str = ""
    end: str = ""
    separator: str = ""
    is_bare: bool = False
    id_chars: int = 0


@dataclass(frozen=True)
class Format:
    """What is read from the text of a model. drops: marks that are left out of the text; `name` is for people."""

    name: str
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    drops: tuple[Mark, ...] = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Return all marks."""
        parts = [part for part in (self.reasoning, self.calls) if part is not None]
        return (*(mark for part in parts for mark in (*part.opens, *part.closes)), *self.drops)


class Field(msgspec.Struct, kw_only=True):
    """A field of a response template, as Hugging Face has it, and from `begin` on what grammars need besides."""

    open: str | list[str] = []
    open_pattern: str | None = None
    close: str | list[str] = []
    close_pattern: str | None = None
    repeats: bool = False
    content: str = "text"
    content_args: dict[str, Any] = {}
    transform: Any = None
    transform_each: bool = False
    begin: str = ""
    end: str = ""
    separator: str = ""
    is_bare: bool = False
    id_chars: int = 0
    then: str = ""

    def marks(self, side: Literal["open", "close"]) -> tuple[Mark, ...]:
        """Return the marks of one side. Raises ValueError for those that are not supported."""
        pattern = getattr(self, f"{side}_pattern")
        if pattern is not None:
            return (Mark.of_pattern(pattern),)
        literals = getattr(self, side)
        return tuple(map(Mark.of, [literals] if isinstance(literals, str) else literals))


class ResponseTemplate(msgspec.Struct, kw_only=True):
    """A table of marks. names: what the arguments `tool_call_parser` and `reasoning_parser` call it. detect: lists of
    texts; a chat template that has all texts of a list is of this format."""

    fields: dict[str, Field]
    start_anchor: str = ""
    names: list[str] = []
    detect: list[list[str]] = []

    def format(self, name: str) -> Format:
        """Return the format. Raises ValueError for what is not supported."""
        fields = self.fields
        thinking = fields.get("reasoning_content") or fields.get("thinking") or fields.get("reasoning")
        calls, content = fields.get("tool_calls"), fields.get("content")
        drops = [] if content is None else [*content.marks("open"), *content.marks("close")]
        if self.start_anchor:
            drops.append(Mark.of(self.start_anchor))
        reasoning = None
        if thinking is not None:
            reasoning = ReasoningFormat(
                thinking.marks("open"), thinking.marks("close"), thinking.repeats, thinking.then
            )
            drops += [Mark.of(thinking.then)] if thinking.then else []
            if not (reasoning.opens and reasoning.closes):
                raise ValueError("reasoning needs an open and a close mark")
        if calls is not None:
            drops += [Mark.of(mark) for mark in (calls.begin, calls.end) if mark]
        return Format(name, reasoning, None if calls is None else _calls(calls), tuple(drops))


def _calls(field: Field) -> CallFormat:
    """Return how calls are written. Raises ValueError for what is not supported."""
    opens, closes = field.marks("open"), field.marks("close")
    content, name_key, arguments_key = _shape(field)
    tag = None
    if content == "tags":
        tag = _tag(field.content_args.get("tag_pattern"))
    if not opens:
        raise ValueError("calls need an open mark")
    return CallFormat(
        opens=opens,
        closes=closes,
        content=content,
        name_key=name_key,
        arguments_key=arguments_key,
        tag=tag,
        is_list=field.transform_each,
        begin=field.begin,
        end=field.end,
        separator=field.separator,
        is_bare=field.is_bare,
        id_chars=field.id_chars,
    )


def _shape(field: Field) -> tuple[Content, str, str]:
    """Return how the content of a call is read, and the keys of name and arguments in it."""
    if field.content not in ("json", "xml-inline", "pythonic") or field.content_args.get("string_delims"):
        raise ValueError(f"calls with the content {field.content} are not supported")
    if field.content == "pythonic":
        return "pythonic", "", ""
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if field.content == "json" and function in (None, "{content}"):
        return "call", "name", "arguments"
    name, arguments = (_path(function, key) for key in ("name", "arguments"))
    if arguments == "content" and name != "content":
        return ("tags" if field.content == "xml-inline" else "json"), "", ""
    if field.content == "xml-inline":
        raise ValueError("the transform of the calls is not supported")
    return "call", name, arguments


def _path(function: Any, key: str) -> str:
    """Return the last part of a placeholder: `arguments` of `{content.arguments}`."""
    value = function.get(key) if isinstance(function, dict) else None
    match = re.fullmatch(r"\{(?:content\.)?(\w+)\}", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("the transform of the calls is not supported")
    return match[1]


def _tag(pattern: Any) -> TagFormat:
    pieces = pieces_of(pattern) if isinstance(pattern, str) else []
    places = [place for place, piece in enumerate(pieces) if piece.group == "value"]
    if len(places) != 1 or not any(piece.group == "key" for piece in pieces[: places[0]]):
        raise ValueError("the pattern of a tag needs the groups key and value")
    return TagFormat(Mark.of_pieces(pieces[: places[0]]), Mark.of_pieces(pieces[places[0] + 1 :]))


@functools.cache
def templates() -> Mapping[str, ResponseTemplate]:
    """Return the formats of this package by the name of their file."""
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".json"): msgspec.json.decode(file.read_bytes(), type=ResponseTemplate)
        for file in files
        if file.name.endswith(".json")
    }


def format_names(part: Literal["tool_calls", "reasoning"]) -> list[str]:
    """Return the names by which a format of calls or of reasoning can be chosen."""
    known = [template for template in templates().values() if _has(template, part)]
    return sorted({name for template in known for name in template.names})


def format_of(
    chat_template: str | None, response_template: Any = None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> Format | None:
    """Return the format of a model, None where nothing is read from its text.

    chat_template: its source. response_template: what tokenizer_config.json has. A parser is a name, `none`, or `auto`:
    the checkpoint's own template, else the one whose marks the chat template has. Raises ConfigError for a name.
    """
    own = _own_format(response_template)
    parts: dict[str, Format | None] = {}
    for part, asked in (("tool_calls", tool_call_parser), ("reasoning", reasoning_parser)):
        found = None
        if asked == AUTO:
            found = own if own is not None and _part(own, part) is not None else _detected(chat_template or "", part)
        elif asked != NONE:
            found = _named(asked, part, chat_template or "")
        parts[part] = found
    calls, reasoning = parts["tool_calls"], parts["reasoning"]
    if calls is None and reasoning is None:
        return None
    used = [each for each in dict.fromkeys((calls, reasoning)) if each is not None]
    return Format(
        name="+".join(each.name for each in used),
        reasoning=None if reasoning is None else reasoning.reasoning,
        calls=None if calls is None else calls.calls,
        drops=tuple(dict.fromkeys(mark for each in used for mark in each.drops)),
    )


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for a parser that is no known name, `none` or `auto`."""
    if {tool_call_parser, reasoning_parser} != {AUTO}:
        format_of(None, None, tool_call_parser, reasoning_parser)


def _own_format(value: Any) -> Format | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, ResponseTemplate).format("checkpoint")
    except (msgspec.ValidationError, ValueError) as error:
        _log.warning("the response_template of tokenizer_config.json is not used: %s", error)
        return None


def _part(of: Format, part: str) -> ReasoningFormat | CallFormat | None:
    return of.calls if part == "tool_calls" else of.reasoning


def _has(template: ResponseTemplate, part: str) -> bool:
    return bool({"tool_calls"} & template.fields.keys()) if part == "tool_calls" else "thinking" in template.fields


def _found(template: ResponseTemplate, chat_template: str) -> int:
    """Return how many characters of a chat template speak for a format, 0 for none."""
    fitting = (texts for texts in template.detect if all(text in chat_template for text in texts))
    return max((sum(map(len, texts)) for texts in fitting), default=0)


def _detected(chat_template: str, part: str) -> Format | None:
    candidates = [(_found(each, chat_template), name) for name, each in templates().items() if _has(each, part)]
    most, name = max(candidates)
    return templates()[name].format(name) if most else None


def _named(asked: str, part: str, chat_template: str) -> Format:
    candidates = [
        (_found(each, chat_template), name)
        for name, each in templates().items()
        if _has(each, part) and asked in each.names
    ]
    if not candidates:
        argument = "tool_call_parser" if part == "tool_calls" else "reasoning_parser"
        names = format_names("tool_calls" if part == "tool_calls" else "reasoning")
        known = ", ".join(("auto", "none", *names))
        raise ConfigError(f"{argument} is {asked!r}{suggestion(asked, names)}; known are {known}")
    _, name = max(candidates, key=lambda each: each[0])
    return templates()[name].format(name)
