"""How help looks: one aligned column of names, one of what they mean, wrapped to the terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

_LEFT, _LEFT_OF_COMMANDS = 34, 16
"""Columns for names; longer ones get a line of their own."""
_NARROW = 72
"""A terminal with fewer columns has the meaning of an option below its name, indented by `_INDENT`."""
_INDENT = 8


class AlignedHelp:
    """A cyclopts help formatter. Plain text: the fancy one takes as long again to import and draw."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        _write(console, f"{_text(panel.title)}:")
        left = _LEFT if console.width >= _NARROW else _INDENT
        if _text(panel.title) == "Commands":
            left = _LEFT_OF_COMMANDS
        for entry in panel.entries:
            _write(console, _entry_text(entry, left, console.width))
        _write(console, "")

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        if usage:
            _write(console, f"Usage: {_text(usage).removeprefix('Usage: ').strip()}\n")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        if description:
            lines = _text(description).splitlines()
            filled = (textwrap.fill(line, console.width, break_on_hyphens=False) for line in lines)
            _write(console, "\n".join(filled) + "\n")


def _entry_text(entry: HelpEntry, left: int, width: int) -> str:
    lines = textwrap.wrap(meaning(entry), max(20, width - left - 1), break_on_hyphens=False) or [""]
    shown = f"  {names(entry)}".ljust(left)
    if len(shown) > left:
        return "\n".join([shown, *(" " * left + line for line in lines)])
    return "\n".join([(shown + lines[0]).rstrip(), *(" " * left + line for line in lines[1:])])


def meaning(entry: HelpEntry) -> str:
    """Return what an option or a command is for, with its default and choices."""
    said = _text(entry.description)
    if entry.default is not None:
        said = f"{said} [default: {entry.default}]"
    return f"{said} [one of: {', '.join(entry.choices)}]" if entry.choices else said


def names(entry: HelpEntry) -> str:
    """Return the names of an option with its kind of value, or that of a command."""
    if entry.negative_names:
        return ", ".join(f"--[no-]{name.removeprefix('--')}" for name in entry.positive_names)
    labels = ", ".join(entry.display_labels)
    return f"{labels} {entry.metavar}" if entry.metavar else labels


def _text(value: Any) -> str:
    """Return the plain text of a value from cyclopts: text, or one of rich's objects."""
    if value is None or isinstance(value, str):
        return value or ""
    if hasattr(value, "primary_renderable"):
        return _text(value.primary_renderable)
    return str(getattr(value, "plain", value)).strip()


def _write(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
