"""Reads the outputs of one chat request: which format, which tools, and how much of a choice is reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.formats.events import CustomInputs, OutputEvent, ReasoningDelta, TextDelta
from octavo.server.formats.format import AUTO, Format, format_of
from octavo.server.formats.grammar import CallGrammar
from octavo.server.formats.parser import OutputParser
from octavo.server.forms import warn_once
from octavo.server.schema.chat import ChatCompletionRequest
from octavo.server.schema.shim import as_json
from octavo.structured_output.grammars import check_grammar

_TAIL_TOKENS: Final = 16
"""Number of last prompt tokens in which an open mark of reasoning is looked for."""

_MOST_SPECIAL: Final = 64

_TOOLS: Final = (
    "You may call one or more functions. Their signatures are in JSON between <tools> and </tools>:\n"
    "<tools>\n{}\n</tools>\n"
    "For each call write a JSON object with the name of the function and its arguments between <tool_call> and "
    '</tool_call>:\n<tool_call>\n{{"name": "NAME", "arguments": {{…}}}}\n</tool_call>'
)


class ModelFormat:
    """The format of a served model, found when it is first used."""

    def __init__(
        self, info: Mapping[str, Any], tokenizer: Tokenizer, parsers: tuple[str, str], *, allows_auto: bool
    ) -> None:
        """info: tokenizer_config.json with the chat template in use. parsers: of calls and of reasoning, as `format_of`
        has them. allows_auto: models may choose to call tools."""
        template = info.get("chat_template")
        self.tokenizer = tokenizer
        self._template = template if isinstance(template, str) else ""
        self._own = info.get("response_template")
        self._parsers = parsers
        self._allows_auto = allows_auto

    @cached_property
    def template_reads_tools(self) -> bool:
        return "tools" in self._template

    @cached_property
    def format(self) -> Format | None:
        """The format. Where the chat template does not support tools, it is that of Hermes, and a message describes the
        tools."""
        calls, reasoning = self._parsers
        if calls == AUTO and not self.template_reads_tools:
            calls = "hermes"
        return format_of(self._template, self._own, calls, reasoning)

    @property
    def marks_reasoning(self) -> bool:
        """Whether it is known how the model marks its reasoning."""
        return self.format is not None and self.format.reasoning is not None

    def check(self, asked: ChatCompletionRequest) -> None:
        """Raise InvalidRequest for tools and thinking budgets that the model does not support. May take a second."""
        if asked.thinking_token_budget is not None and not self.marks_reasoning:
            raise InvalidRequest(
                "thinking_token_budget cannot be used: it is not known how this model marks its reasoning; start the "
                "server with --reasoning-parser",
                field="thinking_token_budget",
                code="unsupported_parameter",
            )
        if not asked.tools or asked.call_mode == "none":
            return
        if self.format is None or self.format.calls is None:
            raise InvalidRequest(
                "tools cannot be used: it is not known how this model writes calls; start the server with "
                "--tool-call-parser",
                field="tools",
                code="unsupported_parameter",
            )
        if asked.call_mode == "auto" and not self._allows_auto:
            raise InvalidRequest(
                "tool_choice is auto, which this server does not allow; set it to required or to one tool, or start "
                "the server with --enable-auto-tool-choice",
                field="tool_choice",
                code="unsupported_parameter",
            )
        if not asked.constrains_calls:
            return

        form = CallGrammar(self.format, asked, self.tokenizer).form()
        try:
            left_out = check_grammar(form)
        except InvalidRequest as error:
            raise _unusable(asked, error) from error
        if left_out:
            warn_once("calls of tools whose schemas are not strict", " ".join(left_out))

    def form(self, asked: ChatCompletionRequest, opened: int | None) -> StructuredOutputsParams | None:
        """Return the form of a response: that of the calls which the request demands, else the form that it states;
        None for any text. The form applies behind reasoning. opened: index of the mark that has opened reasoning in the
        prompt, from `opened_by`."""
        form = asked.form()
        if self.format is None:
            return form
        if asked.must_call or (form is None and asked.constrains_calls):
            form = CallGrammar(self.format, asked, self.tokenizer).form()
        reasoning, budget = self.format.reasoning, asked.thinking_token_budget
        if reasoning is None or (form is None and budget is None):
            return form
        marks: dict[str, Any] = {
            "reasoning_begin": reasoning.opens[0].spelled() if opened is None else "",
            "reasoning_end": reasoning.end_of(opened or 0).spelled(),
            "reasoning_budget": budget,
        }
        return msgspec.structs.replace(form, **marks) if form is not None else StructuredOutputsParams(**marks)

    def with_tools(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the messages and the tools for the chat template. If it does not support tools, they, calls and
        results are described in messages of the roles system, user and assistant."""
        if self.template_reads_tools:
            return messages, tools
        text = _TOOLS.format("\n".join(map(as_json, tools)))
        plain = [_plain(message) for message in messages]
        if plain and plain[0]["role"] == "system":
            given = plain[0]["content"]
            whole = [*given, _part(text)] if isinstance(given, list) else f"{given}\n\n{text}".lstrip()
            plain[0] = {**plain[0], "content": whole}
            return plain, None
        return [{"role": "system", "content": text}, *plain], None

    def reader(self, asked: ChatCompletionRequest) -> OutputReader | None:
        """Return the reader of a request's outputs; None where their text is not parsed."""
        if self.format is None:
            return None
        reads_calls = bool(asked.tools) and asked.call_mode != "none"
        reads_reasoning = self.format.reasoning is not None and asked.separate_reasoning is not False
        if not (reads_calls or reads_reasoning):
            return None
        return OutputReader(self, asked, calls=reads_calls, reasoning=reads_reasoning)

    @property
    def checked_format(self) -> Format:
        assert self.format is not None
        return self.format

    @cached_property
    def special_texts(self) -> list[str]:
        """The texts of special tokens, which are left out; of very many, those that tokenizer_config.json names."""
        texts = [self.tokenizer.added_tokens[token_id] for token_id in self.tokenizer.special_ids]
        return texts if len(texts) <= _MOST_SPECIAL else [*self.tokenizer.special_tokens.values()]

    @cached_property
    def has_special_marks(self) -> bool:
        """Whether marks of the format are special tokens, which texts do not show by default."""
        special = {self.tokenizer.added_tokens[token_id] for token_id in self.tokenizer.special_ids}
        literals = [piece.literal for mark in self.checked_format.marks for piece in mark.pieces if piece.literal]
        return any(text in literal for text in special for literal in literals)

    def opened_by(self, prompt: Prompt) -> int | None:
        """Return the index of the open mark of reasoning with which a prompt ends; None for other prompts."""
        reasoning = None if self.format is None else self.format.reasoning
        if reasoning is None:
            return None
        text = prompt.text or ""
        if prompt.token_ids is not None:
            text = self.tokenizer.decode(prompt.token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        text = text.rstrip()
        return next((place for place, mark in enumerate(reasoning.opens) if text.endswith(mark.spelled())), None)

    def num_tokens_to_close(self, token_ids: Sequence[int], num_known: int) -> int:
        """Return how many tokens the text has up to the first end mark of reasoning, behind `num_known`."""
        assert self.checked_format.reasoning is not None
        closes = [mark.spelled() for mark in self.checked_format.reasoning.closes]

        def has_close(end: int) -> bool:
            text = self.tokenizer.decode(token_ids[max(0, end - 2 * _TAIL_TOKENS) : end], skip_special_tokens=False)
            return any(close in text for close in closes)

        for end in range(num_known + _TAIL_TOKENS, len(token_ids) + _TAIL_TOKENS, _TAIL_TOKENS):
            if has_close(min(end, len(token_ids))):
                return next(place for place in range(end - _TAIL_TOKENS + 1, end + 1) if has_close(place))
        return len(token_ids)


class OutputReader:
    """Reads the choices of one request. shows_special: marks are special tokens, so these must be shown."""

    def __init__(self, model: ModelFormat, asked: ChatCompletionRequest, *, calls: bool, reasoning: bool) -> None:
        self._model = model
        self._asked = asked
        self._reasoning = reasoning
        schemas = {tool.function.name: tool.function.parameters or {} for tool in asked.callable_tools}
        self._tools = schemas if calls else None
        self._custom_names = [tool.function.name for tool in asked.callable_tools if tool.custom is not None]
        self._choices: dict[int, _Choice] = {}
        self.shows_special = model.has_special_marks

    def events(self, output: RequestOutput, completion: CompletionOutput) -> list[OutputEvent]:
        choice = self._choices.get(completion.index)
        if choice is None:
            is_open = self._model.opened_by(Prompt(token_ids=output.prompt_token_ids)) is not None
            hides = self.shows_special and getattr(self._asked, "skip_special_tokens", None) is not False
            parser = OutputParser(
                self._model.checked_format,
                self._tools,
                begins_in_reasoning=self._reasoning and is_open,
                reads_reasoning=self._reasoning,
                drops=self._model.special_texts if hides else (),
            )
            choice = self._choices[completion.index] = _Choice(parser, self._model, self._custom_names)
        events = choice.read(completion)
        if self._asked.include_reasoning is False:
            return [event for event in events if not isinstance(event, ReasoningDelta)]
        return choice.in_one_piece(events, completion.finished) if self._asked.stream_reasoning is False else events

    def has_called(self, index: int) -> bool:
        """Return whether a choice has calls, and has not ended within the last one."""
        return index in self._choices and self._choices[index].parser.has_called

    @property
    def num_reasoning_tokens(self) -> int:
        """Return how many tokens of all choices are reasoning, up to its end mark."""
        return sum(choice.num_reasoning_tokens for choice in self._choices.values())


class _Choice:
    """The parser of a choice, and the tokens of its reasoning."""

    def __init__(self, parser: OutputParser, model: ModelFormat, custom_names: Sequence[str]) -> None:
        self.parser = parser
        self._custom = CustomInputs(custom_names)
        self.num_reasoning_tokens = 0
        self._model = model
        self._token_ids: list[int] | None = []
        self._held: list[str] = []

    def read(self, completion: CompletionOutput) -> list[OutputEvent]:
        events = self.parser.feed(completion.text, is_last=completion.finished)
        if self._token_ids is not None:
            self._token_ids += completion.token_ids
            if self.parser.state == "reasoning":
                self.num_reasoning_tokens = len(self._token_ids)
            elif self.parser.state == "reasoned":
                self.num_reasoning_tokens = self._model.num_tokens_to_close(self._token_ids, self.num_reasoning_tokens)
                self._token_ids = None
            elif any(isinstance(event, TextDelta) for event in events):
                self._token_ids = None
        return self._custom.read(events)

    def in_one_piece(self, events: list[OutputEvent], is_last: bool) -> list[OutputEvent]:
        """Return the events with all pieces of reasoning joined in one event, before the others."""
        self._held += [event.text for event in events if isinstance(event, ReasoningDelta)]
        others: list[OutputEvent] = [event for event in events if not isinstance(event, ReasoningDelta)]
        if self._held and (others or is_last):
            others.insert(0, ReasoningDelta("".join(self._held)))
            self._held = []
        return others


def _unusable(asked: ChatCompletionRequest, error: InvalidRequest) -> InvalidRequest:
    """Return the error for calls whose grammar cannot be used; it names the first tool whose schema cannot be used."""

    for index, tool in enumerate(asked.tools or []):
        function, is_custom = tool.function, tool.custom is not None
        field = f"tools[{index}].{'custom.format' if is_custom else 'function.parameters'}"
        if function.parameters and tool in asked.callable_tools and (asked.must_call or function.strict):
            try:
                options = {} if function.strict else {"x-guidance": {"lenient": True}}
                rule = f"start: %json {json.dumps({**function.parameters, **options})}"
                check_grammar(StructuredOutputsParams(grammar=rule))
            except InvalidRequest as own:
                remedy = "change it" + ("" if is_custom else ", or let tool_choice be auto and leave strict out")
                return InvalidRequest(f"{field}: {own}; {remedy}", field=field, code=own.code)
    return InvalidRequest(f"the schemas of tools cannot be used: {error}", field="tools", code=error.code)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        begin, end = "<tool_response>\n", "\n</tool_response>"
        is_parted = isinstance(content, list)
        return {"role": "user", "content": [_part(begin), *content, _part(end)] if is_parted else begin + content + end}
    calls = [f"<tool_call>\n{as_json(call['function'])}\n</tool_call>" for call in message.get("tool_calls") or []]
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if isinstance(content, list):  # with images, sounds or vectors
        return {**kept, "content": [*content, *map(_part, calls)]}
    return {**kept, "content": "\n".join([content, *calls] if content else calls or [content])}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
