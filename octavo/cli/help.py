"""How help looks: one aligned column of names, one of what they mean, wrapped to the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

_LEFT = 34
"""Columns for names; longer ones get a line of their own."""


class AlignedHelp:
    """A cyclopts help formatter. Plain text: the fancy one takes as long again to import and draw."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        _write(console, f"{_text(panel.title)}:")
        for entry in panel.entries:
            _write(console, _entry_text(entry, console.width))
        _write(console, "")

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        if usage:
            _write(console, f"Usage: {_text(usage).removeprefix('Usage: ')}\n")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        if description:
            _write(console, f"{_text(description)}\n")


def _entry_text(entry: HelpEntry, width: int) -> str:
    names = _names(entry)
    meaning = _text(entry.description)
    if entry.default is not None:
        meaning = f"{meaning} [default: {entry.default}]"
    if entry.choices:
        meaning = f"{meaning} [one of: {', '.join(entry.choices)}]"
    lines = textwrap.wrap(meaning, max(20, width - _LEFT - 1)) or [""]
    left = f"  {names}".ljust(_LEFT)
    if len(left) > _LEFT:
        return "\n".join([left, *(" " * _LEFT + line for line in lines)])
    return "\n".join([(left + lines[0]).rstrip(), *(" " * _LEFT + line for line in lines[1:])])


def _names(entry: HelpEntry) -> str:
    if entry.negative_names:
        return ", ".join(f"--[no-]{name.removeprefix('--')}" for name in entry.positive_names)
    names = ", ".join(entry.display_labels)
    return f"{names} {entry.metavar}" if entry.metavar else names


def _text(value: Any) -> str:
    """Return the plain text of a value from cyclopts: text, or one of rich's objects."""
    if value is None or isinstance(value, str):
        return value or ""
    if hasattr(value, "primary_renderable"):
        return _text(value.primary_renderable)
    return str(getattr(value, "plain", value)).strip()


def _write(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
