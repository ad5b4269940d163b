"""The flags that commands have of their own, from their help."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console

from octavo.cli.help import meaning, names
from octavo.cli.main import BENCHMARKS, COMMANDS, build_app
from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.config.server_args import ServerArgs
from octavo.core.sampling_params import documented_fields


def own_flags() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield each command that has flags which no other reference page has: flags → meanings."""
    elsewhere = {(name, each.doc) for name, each in documented_fields().items()}
    for cls in (EngineArgs, ServerArgs):
        elsewhere |= {(name, each.arg.doc) for name, each in arguments(cls).items()}
    for words in [*([name] for name, *_ in COMMANDS), *(["bench", name] for name, *_ in BENCHMARKS)]:
        found = {names(each): meaning(each) for each in _entries(words) if not _described(each) & elsewhere}
        if found:
            yield f"octavo {' '.join(words)}", found


def _entries(words: list[str]) -> list[HelpEntry]:
    app, found = build_app(), list[HelpEntry]()

    def collect(console: object, options: object, panel: HelpPanel) -> None:
        found.extend(each for each in panel.entries if each.positive_names != ("--config",))

    app.help_formatter = collect
    app.help_print(words, console=Console(file=io.StringIO()))
    return found


def _described(entry: HelpEntry) -> set[tuple[str, str]]:
    """The names of an option as those of arguments, each with what it is for."""
    said = meaning(entry).partition(" [default: ")[0].partition(" [one of: ")[0].partition(" As JSON, such as ")[0]
    return {(each.removeprefix("--").replace("-", "_"), said) for each in entry.positive_names}
