"""The reference pages of arguments, sampling parameters, commands, limits, models and devices, made from the annotated
fields, the help of the commands, the table, the families and the devices.

python -m tools.reference docs/reference
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from octavo.config.args import EngineArgs
from octavo.config.fields import Argument, arguments, describe_bounds, describe_default, shown
from octavo.config.server_args import ServerArgs
from octavo.core.request_limits import (
    MAX_DEPTH,
    MAX_LOGPROB_ENTRIES,
    MAX_POOLED_VALUES,
    MAX_REQUEST_TOKENS,
    MAX_RESPONSE_LOGPROBS,
    MAX_SEQUENCES,
    REQUEST_LIMITS,
)
from tools import commands, devices, families

_INTRODUCTION = """\
<!-- Made by `python -m tools.reference docs/reference`; edit the fields in octavo/{source} instead. -->
# {title}

{text}
"""

_ENGINE_TEXT = """\
Each argument has one name in four spellings: the keyword `max_num_seqs` of `LLM` and `EngineArgs`, the flag
`--max-num-seqs`, the key `max_num_seqs` (or `max-num-seqs`) of the YAML file given by `--config`, and the variable
`OCTAVO_MAX_NUM_SEQS`. A flag or keyword wins over a variable, a variable over the file, the file over the default.
A name that octavo does not know is an error that names the nearest one, or what octavo has in the place of an option of
[vLLM](../recipes/from-vllm.md) or another engine; variables that Kubernetes sets for a service
named octavo, such as `OCTAVO_SERVICE_HOST` and `OCTAVO_PORT=tcp://…`, are ignored with a note. A flag that is on or off
has a second form, such as `--no-enable-prefix-caching`. A whole number may have a suffix: `32k` is 32,000 and `32K` is
32,768, and so are m, g, M and G.
"""

_SERVER_TEXT = "What `octavo serve` takes besides the [engine arguments](engine-arguments.md), spelt in the same ways."

_SAMPLING_TEXT = """\
Fields of `SamplingParams`, of a request to the server, and flags of `octavo run`. A request is refused when a value is
outside its limits; the message names the field, the value and the limit.
"""

_COMMANDS_TEXT = """\
What commands take besides the [engine arguments](engine-arguments.md), the [server arguments](server-arguments.md) and
the [sampling parameters](sampling-parameters.md); `octavo COMMAND --help` lists these where a command has them.
`--config FILE` reads engine and server arguments from a YAML file. A name in capitals stands for a word that needs no
flag, as in `octavo run MODEL PROMPT`.
"""

_LIMITS_TEXT = """\
The most that lists and texts of one request may hold; `octavo serve` refuses more with status 400 and the name of the
field, `LLM` with `InvalidRequest`. Besides, a body has at most `--max-body-size` bytes, a completion request at most
{tokens:,} token ids in its prompts and {sequences:,} sequences (prompts times `n` or `best_of`), free-form JSON nests
at most {depth} deep, the log-probabilities of prompts have at most {logprobs:,} entries together (prompt tokens times
`prompt_logprobs` plus one; only in a server), those of the outputs of a response that is not streamed at most
{response_logprobs:,}, vectors and scores at most {pooled:,} values together (only in a server; one of each text, or of
each token of it), and a prompt fits the model's context.
"""

_FLAG = re.compile(r"(?<![`\w-])--[a-z][a-z-]*")


def pages() -> dict[str, str]:
    """File name → Markdown of every generated page."""
    return {
        "engine-arguments.md": _page("Engine arguments", _ENGINE_TEXT, EngineArgs, "config/args.py"),
        "server-arguments.md": _page("Server arguments", _SERVER_TEXT, ServerArgs, "config/server_args.py"),
        "sampling-parameters.md": _sampling_page(),
        "commands.md": _commands_page(),
        "request-limits.md": _limits_page(),
        "models.md": families.page(),
        "devices.md": devices.page(),
    }


def describe_limits(argument: Argument) -> str:
    """The values an argument takes, in words."""
    arg = argument.arg
    if arg.only is not None:
        return " or ".join(f"`{shown(value)}`" for value in arg.only) + f" ({arg.otherwise})"
    if arg.choices is not None:
        return ", ".join(f"`{choice}`" for choice in arg.choices)
    noun = {
        bool: "on or off",
        int: "whole number",
        float: "number",
        str: "text",
        tuple: "texts",
        dict: "name=value pairs",
    }
    words = (
        "bytes"
        if arg.is_bytes
        else "number of GiB"
        if arg.is_gib
        else "JSON object"
        if argument.kind is dict and argument.of is Any
        else noun[argument.kind]
    )
    return words + describe_bounds(arg)


def _page(title: str, text: str, cls: type, source: str) -> str:
    groups: dict[str, list[str]] = {}
    for argument in arguments(cls).values():
        limits = describe_limits(argument)
        row = f"| `{argument.name}` | `{describe_default(argument)}` | {limits} | {_as_code(argument.arg.doc)} |"
        groups.setdefault(argument.group, []).append(row)
    parts = [_INTRODUCTION.format(title=title, text=text.strip(), source=source)]
    parts += [f"## {group}\n\n{_arguments('argument', 'values', rows)}" for group, rows in groups.items()]
    return "\n".join(parts)


def _as_code(meaning: str) -> str:
    return _FLAG.sub(r"`\g<0>`", meaning).replace("|", r"\|")


def _arguments(name: str, limits: str, rows: Sequence[str]) -> str:
    return name_table([f"| {name} | default | {limits} | meaning |", "|---|---|---|---|", *rows])


def name_table(lines: Sequence[str]) -> str:
    """A table that the site shows as a list where the screen is narrow (docs/stylesheets/site.css)."""
    table = "\n".join(lines)
    return f'<div class="arguments" markdown="1">\n\n{table}\n\n</div>\n'


def _sampling_page() -> str:
    from octavo.core.sampling_params import SamplingParams, documented_fields

    default = SamplingParams()
    rows = []
    for name, param in documented_fields().items():
        value = getattr(default, name)
        text = value.value if hasattr(value, "value") else shown(value)
        rows.append(f"| `{name}` | `{text}` | {describe_bounds(param).removeprefix(', ')} | {param.doc} |")
    introduction = _INTRODUCTION.format(
        title="Sampling parameters", text=_SAMPLING_TEXT.strip(), source="core/sampling_params.py"
    )
    return f"{introduction}\n{_arguments('parameter', 'limits', rows)}"


def _commands_page() -> str:
    parts = [_INTRODUCTION.format(title="Flags of commands", text=_COMMANDS_TEXT.strip(), source="cli")]
    for command, flags in commands.own_flags():
        rows = [f"| `{flag}` | {_as_code(meaning)} |" for flag, meaning in flags.items()]
        parts.append(f"## {command}\n\n" + name_table(["| flag | meaning |", "|---|---|", *rows]))
    return "\n".join(parts)


def _limits_page() -> str:
    text = _LIMITS_TEXT.format(
        tokens=MAX_REQUEST_TOKENS,
        sequences=MAX_SEQUENCES,
        depth=MAX_DEPTH,
        logprobs=MAX_LOGPROB_ENTRIES,
        response_logprobs=MAX_RESPONSE_LOGPROBS,
        pooled=MAX_POOLED_VALUES,
    ).strip()
    lines = [
        _INTRODUCTION.format(title="Limits of a request", text=text, source="core/request_limits.py"),
        "| fields | entries | characters of one text | characters together | values, at all depths | because |",
        "|---|---|---|---|---|---|",
    ]
    alike: dict[str, list[str]] = {}
    for name, limits in REQUEST_LIMITS.items():
        numbers = (limits.entries, limits.chars, limits.total_chars, limits.values)
        cells = " | ".join("" if number is None else f"{number:,}" for number in numbers)
        alike.setdefault(f"{cells} | {limits.because}", []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {cells} |" for cells, names in alike.items()]
    return "\n".join(lines) + "\n"


def main(directory: str) -> None:
    """Write the pages into `directory`."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    # about configs of the small checkpoints, which are as they have to be
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    families.FILE.write_text(families.text(), encoding="utf-8")
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/reference")
