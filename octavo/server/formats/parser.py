"""Splits the text of a model into text, reasoning and calls, while it is generated."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import Any, Literal

from octavo.server.formats.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallBegin
from octavo.server.formats.format import Format
from octavo.server.formats.marks import Found, Mark, Marks
from octavo.server.formats.readers import READERS
from octavo.server.formats.source import Malformed, Reading, Source, Trimmed
from octavo.server.formats.writing import CallWriter


class OutputParser:
    """Reads the text of one choice. The time is linear in the text, and the joined events do not depend on the cuts.

    White space beside a mark is left out. Text between marks of calls that is no call stays text. Reasoning ends at its
    mark, or at a call of a known tool, as models forget the mark before calls.
    """

    def __init__(
        self,
        of: Format,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        begins_in_reasoning: bool = False,
        reads_reasoning: bool = True,
        drops: Iterable[str] = (),
    ) -> None:
        """tools: the schemas of parameters by name; None where calls stay text. begins_in_reasoning: the prompt ends
        with an open mark of reasoning. drops: further texts that are left out, such as special tokens."""
        self._source = Source()
        self._format = of
        self._writer = (
            None if of.calls is None or tools is None else CallWriter(tools, of.calls.id_chars, of.calls.id_form)
        )
        roles: dict[Mark, str] = {}
        ends: tuple[Mark, ...] = ()
        if of.reasoning is not None and reads_reasoning:
            is_text, ends = of.reasoning.is_text, of.reasoning.closes
            roles |= dict.fromkeys(of.reasoning.opens, "text" if is_text else "reasoning")
            roles |= dict.fromkeys(ends if is_text else (), "text")
        if of.calls is not None and tools is not None:
            roles |= dict.fromkeys((mark for mark in of.calls.closes if mark not in of.drops), "close")
            roles |= dict.fromkeys(of.calls.opens, "call")
            if of.reasoning is not None and not of.reasoning.repeats:
                begin = of.calls.begin.strip()
                ends += (*of.calls.opens, *(mark.behind(begin) for mark in of.calls.opens if begin))
        roles = dict.fromkeys([*map(Mark.of, drops), *of.drops], "drop") | roles
        self._roles = roles
        self._marks = Marks(roles)
        self._ends_of_reasoning = Marks(ends)
        self.state: Literal["text", "reasoning", "reasoned"] = "text"
        """The current part of the output."""
        self._text = Trimmed(lambda piece: (TextDelta(piece),))
        self._is_bare = self._writer is not None and of.calls is not None and of.calls.is_bare
        self._reasons_again = of.reasoning is not None and of.reasoning.repeats
        self._closes = of.calls.closes if of.calls is not None else ()
        self._owes_close = False
        """Whether a mark that both opens and closes calls, as fences of code do, closes the last ones."""
        self._reading: Generator[OutputEvent | None, None, None] = self._run(begins_in_reasoning)

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:
        """Return the events of a further piece of text. is_last: it is the end of the text."""
        self._source.push(text, is_last)
        events: list[OutputEvent] = []
        for event in self._reading:
            if event is None:
                break
            events.append(event)
        return events

    def _run(self, begins_in_reasoning: bool) -> Reading[None]:
        if begins_in_reasoning and "reasoning" in self._roles.values():
            yield from self._reasoning()
        elif begins_in_reasoning and self._format.reasoning is not None and self._format.reasoning.is_text:
            yield from self._text(self._format.reasoning.opens[0].spelled())
        while True:
            if self._is_bare and not self._text.has_begun:
                yield from self._bare_call()
            found = yield from self._source.until(self._marks, self._text, self._is_cut_mark)
            if found is None:
                yield from self._text.rest()
                return
            role = self._roles[found.mark]
            if self._owes_close and found.mark in self._closes:
                self._owes_close = False
                yield from self._text.cut()
            elif role == "call":
                yield from self._call(found, self._text)
            elif role == "reasoning" and (self._reasons_again or not self._text.has_begun):
                yield from self._reasoning()
            elif role == "drop" or (role == "close" and self.num_calls):
                yield from self._text.cut()
            else:
                yield from self._text(self._source.text[found.start : found.end])

    def _is_cut_mark(self, rest: str) -> bool:
        """Return whether the text ends within a mark behind the last call."""
        begun = rest.strip()
        if not (begun and self.num_calls and self._text.is_at_mark):
            return False
        if self._marks.is_begun(begun):
            return True
        marks = [mark.spelled().lstrip() for mark in (*self._closes, *self._format.drops)]
        # of a long mark, a shorter one may have been found already
        tails = (mark.removeprefix(shorter) for mark in marks for shorter in ("", *marks))
        return any(tail.startswith(begun) for tail in tails)

    @property
    def num_calls(self) -> int:
        return 0 if self._writer is None else self._writer.num_calls

    @property
    def has_called(self) -> bool:
        """Return whether there are calls, and the text has not ended within the last one."""
        return self._writer is not None and self._writer.num_calls > 0 and not self._writer.is_cut

    def _reasoning(self) -> Reading[None]:
        assert self._format.reasoning is not None
        self.state = "reasoning"
        yield from self._text.cut()
        text = Trimmed(lambda piece: (ReasoningDelta(piece),), is_at_mark=True)
        while (found := (yield from self._source.until(self._ends_of_reasoning, text))) is not None:
            if found.mark in self._format.reasoning.closes or (yield from self._call(found, text)):
                self.state = "reasoned"
                return
        yield from text.rest()

    def _bare_call(self) -> Reading[None]:
        """Read calls that begin the text without a mark, where there are any."""
        self._source.keep_from(self._source.at)
        char = yield from self._source.peek()
        if char and char in "[{":
            yield from self._call(None, self._text)
        else:
            yield from self._text(self._source.kept())

    def _call(self, found: Found | None, text: Trimmed) -> Reading[bool]:
        """Read the calls behind a mark; what is no call belongs to the text before it. Return whether there is one."""
        assert self._writer is not None
        assert self._format.calls is not None
        if found is not None:
            self._source.keep_from(found.start)
        is_first = True
        try:
            for event in READERS[self._format.calls.content](self._source, self._format.calls, self._writer, found):
                if isinstance(event, ToolCallBegin):
                    if is_first and text is not self._text and event.name not in self._writer.tools:
                        self._writer.take_back()
                        raise Malformed
                    self._source.drop_kept()
                    if is_first:
                        is_first = False
                        yield from self._text.cut()
                yield event
        except Malformed:
            yield from (text if is_first else self._text)(self._source.kept())
        self._owes_close = found is not None and not is_first
        return not is_first
