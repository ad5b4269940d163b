"""Engine arguments as flags of a program of one's own, which parses its command line with argparse."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.config.args import EngineArgs
from octavo.config.fields import Argument, arguments, describe_bounds, describe_default, whole_number
from octavo.config.sources import gather
from octavo.core.absent import remark

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes the words of flags with underscores, too, and says why octavo lacks an engine
    argument of vLLM. A flag that is added twice is the later one, so that a program may have a flag of its own under
    the name of an engine argument."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{"conflict_handler": "resolve", **keywords})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in given], namespace)

    def error(self, message: str) -> Any:
        """End the program with status 2, the usage and a message, which says why octavo lacks an argument."""
        _, _, words = message.partition("unrecognized arguments: ")
        flags = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
        known = arguments(EngineArgs)
        said = [f"; {flag}{about}" for flag in flags if (about := remark(flag[2:].replace("-", "_"), known))]
        super().error(message + "".join(said))

    def _spelled(self, word: str) -> str:
        """Return a word of the command line with its flag as it was added."""
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return word
        found = flag.replace("_", "-")
        return found + equals + value if found in self._option_string_actions else word


def add_engine_flags(parser: Parser) -> Parser:
    """Add a flag for each engine argument to a parser, and return it. The defaults are those of EngineArgs under the
    OCTAVO_* variables and the YAML file. Raises ConfigError for a wrong variable."""
    defaults, groups = gather(EngineArgs, {}), dict[str, Any]()
    for argument in arguments(EngineArgs).values():
        group = groups.get(argument.group)
        if group is None:
            group = groups[argument.group] = parser.add_argument_group(argument.group)
        _add(group, argument, getattr(defaults, argument.name))
    return parser


def _add(group: Any, argument: Argument, default: Any) -> None:
    shown = describe_default(argument)
    text = argument.arg.doc + ("" if shown in ("none", "") else f" [default: {shown}]")
    keywords: dict[str, Any] = {"default": default, "help": text.replace("%", "%%")}
    if argument.kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif argument.kind is tuple:
        keywords |= {"nargs": "+", "metavar": "TEXT"}
    else:
        keywords |= {"metavar": argument.name.upper(), "type": _reader(argument)}
    group.add_argument("--" + argument.name.replace("_", "-"), **keywords)


def _reader(argument: Argument) -> Callable[[str], Any]:
    """Return a function that reads a flag's text or raises ArgumentTypeError; EngineArgs checks the value."""
    if argument.kind not in (int, float) or argument.is_size:
        return str

    def read(text: str) -> Any:
        try:
            return whole_number(text) if argument.kind is int else float(text)
        except ValueError:
            words = "a whole number" if argument.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}, expected {words}{describe_bounds(argument.arg)}") from None

    return read


def args_of_namespace(found: argparse.Namespace) -> EngineArgs:
    """Return the engine arguments among parsed flags; others are left out. Raises ConfigError for a wrong value."""
    return EngineArgs(**{name: value for name, value in vars(found).items() if name in arguments(EngineArgs)})
