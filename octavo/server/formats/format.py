"""A format: the marks of reasoning and of calls. It is a table in the shape of Hugging Face's response templates."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from octavo.core.absent import value_remark
from octavo.errors import ConfigError, suggestion
from octavo.server.formats.marks import Mark, Marks, pieces_of

AUTO: Final = "auto"
NONE: Final = "none"
OWN: Final = "hf"
"""The parser that is the checkpoint's response_template alone."""

_log = logging.getLogger(__name__)

Content = Literal["json", "call", "tags", "pythonic", "lax"]
Part = Literal["calls", "reasoning"]
_FIELD_AND_ARGUMENT: Final[Mapping[Part, tuple[str, str]]] = {
    "calls": ("tool_calls", "tool_call_parser"),
    "reasoning": ("thinking", "reasoning_parser"),
}
"""For each part of a format: its field in our files, and the argument that names its parser."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of reasoning. repeats: reasoning may come again after other text. then: a mark between reasoning and
    the text after it. is_text: reasoning stays in the text, with its marks.
    """

    opens: tuple[Mark, ...]
    closes: tuple[Mark, ...]
    repeats: bool = False
    then: str = ""
    is_text: bool = False

    def end_of(self, opened: int) -> Mark:
        """Return the close mark of the open mark with this index if each has its own; else the first close mark."""
        return self.closes[opened if len(self.opens) == len(self.closes) else 0]


@dataclass(frozen=True)
class TagFormat:
    """An argument of a call: the mark before its value, with the group `key`, and the mark behind it.

    The open mark may also have the group `is_string`, which is `true` for texts, or `type`, which is `string` for them.

    is_exact: all white space beside the value belongs to it where it is a text. is_nested: that, too, and objects and
    lists are tags within tags; the close mark has the key as the group `end`. is_xml: a text may stand in CDATA.
    """

    open: Mark
    close: Mark
    is_exact: bool = False
    is_nested: bool = False
    is_xml: bool = False

    def end(self, key: str) -> Mark:
        """Return the mark behind the value of a key."""
        return Mark.of(self.close.spelled(end=key)) if self.is_nested else self.close

    @cached_property
    def marks(self) -> Marks:
        return Marks((self.open, self.close))

    @cached_property
    def closes(self) -> Marks:
        return Marks((self.close,))


class CallLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The text around calls. begin, end: marks around all calls of a turn. separator: what stands between two calls.
    is_bare: the calls may be the whole text, without a mark. id_chars: how many letters and digits an id has, 0 for
    OpenAI's form. id_form: the id as the model writes it, with groups of the open mark in braces; empty where it writes
    none. leads: patterns, each of which may stand before the calls that a request demands. is_keyed: an object has the
    name as its key.
    """

    begin: str = ""
    end: str = ""
    separator: str = ""
    is_bare: bool = False
    id_chars: int = 0
    id_form: str = ""
    leads: tuple[str, ...] = ()
    is_keyed: bool = False


class CallFormat(CallLayout, frozen=True, kw_only=True):
    """How calls are written.

    content: what is between the marks: `json`, the arguments alone, with the name in the mark; `call`, objects with
    name and arguments, alone or in a list; `tags`, each argument between tags; `pythonic`, Python calls, in a list
    unless there is a separator; `lax`, as `json`, with bare keys, and `quote` on both sides of texts.
    """

    opens: tuple[Mark, ...]
    closes: tuple[Mark, ...] = ()
    content: Content = "call"
    name_key: str = "name"
    arguments_key: str = "arguments"
    tag: TagFormat | None = None
    is_list: bool = False
    quote: str = ""


@dataclass(frozen=True)
class Format:
    """What is read from the text of a model. drops: marks that are left out of the text; `name` is for people."""

    name: str
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    drops: tuple[Mark, ...] = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        parts = [part for part in (self.reasoning, self.calls) if part is not None]
        return (*(mark for part in parts for mark in (*part.opens, *part.closes)), *self.drops)


class Field(CallLayout, frozen=True, kw_only=True):
    """A field of a response template, as Hugging Face has it, besides the layout of calls, which grammars need."""

    open: str | list[str] = []
    open_pattern: str | list[str] | None = None
    close: str | list[str] = []
    close_pattern: str | list[str] | None = None
    repeats: bool = False
    content: str = "text"
    content_args: dict[str, Any] = {}
    transform: Any = None
    transform_each: bool = False
    then: str = ""
    is_text: bool = False

    def marks(self, side: Literal["open", "close"]) -> tuple[Mark, ...]:
        """Return the marks of one side. Raises ValueError for those that are not supported."""
        pattern = getattr(self, f"{side}_pattern")
        if pattern is not None:
            patterns = [pattern] if isinstance(pattern, str) else pattern
            return tuple(Mark.of_pieces(pieces_of(each)) for each in patterns)
        literals = getattr(self, side)
        return tuple(map(Mark.of, [literals] if isinstance(literals, str) else literals))


class ResponseTemplate(msgspec.Struct, kw_only=True):
    """A table of marks. names: what the arguments `tool_call_parser` and `reasoning_parser` call it. detect: lists of
    texts; a chat template that has all texts of a list is of this format."""

    fields: dict[str, Field]
    start_anchor: str | list[str] = []
    names: list[str] = []
    detect: list[list[str]] = []

    def format(self, name: str) -> Format:
        """Return the format. Raises ValueError for what is not supported."""
        fields = self.fields
        thinking = fields.get("reasoning_content") or fields.get("thinking") or fields.get("reasoning")
        calls, content = fields.get("tool_calls"), fields.get("content")
        drops = [] if content is None else [*content.marks("open"), *content.marks("close")]
        anchors = self.start_anchor if isinstance(self.start_anchor, list) else [self.start_anchor]
        drops += [Mark.of(anchor) for anchor in anchors if anchor]
        reasoning = None
        if thinking is not None:
            reasoning = ReasoningFormat(
                thinking.marks("open"), thinking.marks("close"), thinking.repeats, thinking.then, thinking.is_text
            )
            drops += [Mark.of(thinking.then)] if thinking.then else []
            if not (reasoning.opens and reasoning.closes):
                raise ValueError("reasoning needs an open and a close mark")
        if calls is not None:
            drops += [Mark.of(mark.strip()) for mark in (calls.begin, calls.end) if mark]
        return Format(name, reasoning, None if calls is None else _calls(calls), tuple(drops))


def _calls(field: Field) -> CallFormat:
    """Return how calls are written. Raises ValueError for what is not supported."""
    opens, closes = field.marks("open"), field.marks("close")
    content, name_key, arguments_key = _shape(field)
    tag = _tag(field.content_args) if content == "tags" else None
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
        quote=_quote(field.content_args) if content == "lax" else "",
        **{name: getattr(field, name) for name in CallLayout.__struct_fields__},
    )


def _shape(field: Field) -> tuple[Content, str, str]:
    """Return how the content of a call is read, and the keys of name and arguments in it."""
    if field.content not in ("json", "xml-inline", "pythonic"):
        raise ValueError(f"calls with the content {field.content} are not supported")
    if field.content == "pythonic":
        return "pythonic", "", ""
    if field.is_keyed:
        return "call", "", ""
    is_lax = bool(field.content_args.get("string_delims") or field.content_args.get("unquoted_keys"))
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if field.content == "json" and function in (None, "{content}") and not is_lax:
        return "call", "name", "arguments"
    name, arguments = (_path(function, key) for key in ("name", "arguments"))
    if arguments == "content" and name != "content":
        return ("tags" if field.content == "xml-inline" else "lax" if is_lax else "json"), "", ""
    if field.content == "xml-inline" or is_lax:
        raise ValueError("the transform of the calls is not supported")
    return "call", name, arguments


def _path(function: Any, key: str) -> str:
    """Return the last part of a placeholder: `arguments` of `{content.arguments}`."""
    value = function.get(key) if isinstance(function, dict) else None
    match = re.fullmatch(r"\{(?:content\.)?(\w+)\}", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("the transform of the calls is not supported")
    return match[1]


def _quote(args: Mapping[str, Any]) -> str:
    """Return what stands on both sides of texts. Raises ValueError for marks of texts that are not supported."""
    match args.get("string_delims"):
        case [[str(begin), str(end)]] if begin == end != "":
            return begin
        case None | []:
            return '"'
    raise ValueError("texts with the marks string_delims of the calls are not supported")


def _tag(args: Mapping[str, Any]) -> TagFormat:
    pattern = args.get("tag_pattern")
    pieces = pieces_of(pattern) if isinstance(pattern, str) else []
    places = [place for place, piece in enumerate(pieces) if piece.group == "value"]
    if len(places) != 1 or not any(piece.group == "key" for piece in pieces[: places[0]]):
        raise ValueError("the pattern of a tag needs the groups key and value")
    kinds = (bool(args.get(name)) for name in ("is_exact", "is_nested", "is_xml"))
    return TagFormat(Mark.of_pieces(pieces[: places[0]]), Mark.of_pieces(pieces[places[0] + 1 :]), *kinds)


class FormatFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON file of this folder: formats by name, which write calls in one way. tool_calls: what these calls share.

    A format has `names`, `detect`, and the fields of a response template.
    """

    formats: dict[str, dict[str, Any]]
    tool_calls: dict[str, Any] = {}

    def template(self, name: str) -> ResponseTemplate:
        """Return the template of a format."""
        fields = {**self.formats[name]}
        names, detect = fields.pop("names"), fields.pop("detect", [])
        if (given := fields.get("tool_calls")) is not None:
            args = {**self.tool_calls.get("content_args", {}), **given.get("content_args", {})}
            fields["tool_calls"] = {**self.tool_calls, **given, "content_args": args}
        return msgspec.convert({"names": names, "detect": detect, "fields": fields}, ResponseTemplate)


@functools.cache
def templates() -> Mapping[str, ResponseTemplate]:
    """Return the formats of this package by their names, in the order of these."""
    paths = (path for path in resources.files(__package__).iterdir() if path.name.endswith(".json"))
    files = (msgspec.json.decode(path.read_bytes(), type=FormatFile) for path in paths)
    return dict(sorted((name, file.template(name)) for file in files for name in file.formats))


def format_of(
    chat_template: str | None, response_template: Any = None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> Format | None:
    """Return the format of a model; None if its text is not parsed.

    chat_template: its source. response_template: what tokenizer_config.json has. A parser is a name, `none`, `hf`, the
    checkpoint's own template, or `auto`: that, else the one whose marks the chat template has. Raises ConfigError for
    a name.
    """
    own = _own_format(response_template)
    calls = _format_with("calls", tool_call_parser, own, chat_template or "")
    reasoning = _format_with("reasoning", reasoning_parser, own, chat_template or "")
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


def _format_with(part: Part, asked: str, own: Format | None, chat_template: str) -> Format | None:
    """Return the format that supplies calls or reasoning; None if they are not parsed. asked: a parser, as in
    `format_of`."""
    if asked == NONE:
        return None
    if asked in (AUTO, OWN) and own is not None and getattr(own, part) is not None:
        return own
    if asked == OWN:
        return None
    field, argument = _FIELD_AND_ARGUMENT[part]
    known = {name: each for name, each in templates().items() if field in each.fields}
    scores = {
        name: _num_found(each, chat_template) for name, each in known.items() if asked == AUTO or asked in each.names
    }
    if not scores:
        names = sorted({name for each in known.values() for name in each.names})
        expected = f"expected one of {', '.join((AUTO, NONE, OWN, *names))}{suggestion(asked, names)}"
        raise ConfigError(f"{argument} is {asked!r}, {value_remark(argument, asked) or expected}")
    best = max(scores, key=scores.__getitem__)
    return known[best].format(best) if scores[best] or asked != AUTO else None


def _num_found(template: ResponseTemplate, chat_template: str) -> int:
    """Return how many characters of a chat template match a `detect` list of the format; 0 if none does."""
    fitting = (texts for texts in template.detect if all(text in chat_template for text in texts))
    return max((sum(map(len, texts)) for texts in fitting), default=0)
