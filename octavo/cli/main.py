"""The console script: finds the command, and turns the errors that octavo raises on purpose into one line each."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from octavo import __version__
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.errors import OctavoError, ServerUnreachable

if TYPE_CHECKING:  # the parser is imported while the core of a server is
    from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

COMMANDS = (
    ("run", "octavo.cli.run:run", "Continue a text, written as it is generated."),
    ("chat", "octavo.cli.chat:chat", "Talk to a model."),
    ("serve", "octavo.cli.serve:serve", "Serve a model over HTTP, as the OpenAI API does."),
    ("run-batch", "octavo.cli.run_batch:run_batch", "Run the requests of a file in OpenAI's batch format."),
    ("proxy", "octavo.cli.proxy:proxy", "Serve a model over HTTP with engines on other machines."),
    ("rank", "octavo.cli.rank:rank", "Compute on this machine for an engine that another machine serves."),
    ("top", "octavo.cli.top:top", "Watch a server: requests, tokens per second, queues, KV cache."),
    ("simulate", "octavo.cli.simulate:simulate", "Run the scheduler in simulated time, on a trace or a recording."),
    ("replay", "octavo.cli.replay:replay", "Take the decisions of a recorded run once more, and compare them."),
    ("pull", "octavo.cli.models:pull", "Download a model from a hub."),
    ("list", "octavo.cli.models:list_models", "List the models that are on this machine."),
    ("rm", "octavo.cli.models:remove", "Remove a model from this machine."),
    ("quantize", "octavo.cli.quantize:quantize", "Write a checkpoint with quantised weights."),
    ("models", "octavo.cli.models:families", "List the families of models and what is supported."),
    ("explain", "octavo.cli.explain:explain", "Show what octavo would do with a model on this machine, and why."),
)
_POSITIONAL = {
    "run": "[MODEL] [PROMPT]",
    "pull": "MODEL",
    "rm": "MODEL",
    "quantize": "MODEL OUTPUT",
    **dict.fromkeys(("chat", "serve", "proxy", "explain"), "[MODEL]"),
}
"""The positional arguments in the line `Usage` of a command; cyclopts writes [ARGS] for optional ones."""

BENCHMARKS = (
    ("throughput", "octavo.cli.bench:throughput", "Tokens per second of many requests at once."),
    ("serve", "octavo.cli.bench_serve:serve", "Times and throughput of any OpenAI server under load."),
    ("latency", "octavo.cli.bench:latency", "Seconds of one batch, and per token."),
    ("calibrate", "octavo.cli.calibrate:calibrate", "Fit a cost model for octavo simulate to steps on this machine."),
    ("validate", "octavo.cli.validate:validate", "Compare loads on this machine with their simulation."),
    ("startup", "octavo.cli.bench:startup", "Seconds from nothing to the first token."),
)


_FIELD: Final = re.compile(r"--[a-z_-]+\.")
"""The flag of one field of an object, as in `--speculative-config.method`."""
_NO_CORE: Final = re.compile(r"-h|--help|--version|--role(=.*)?")
"""With any of these words `octavo serve` starts no process for its core."""


def build_app(core: SpawnedCore | None = None) -> App:
    """Return the tree of commands; the module of a command is imported when it runs. core: that of `octavo serve`."""
    from cyclopts import App, Group

    from octavo.cli.help import AlignedHelp

    app = App(
        name="octavo",
        help="Serve large language models: from a prompt to text, offline and over HTTP.",
        version=__version__,
        help_format="plaintext",
        help_formatter=AlignedHelp(),
        group_parameters=Group("Options"),
        suppress_keyboard_interrupt=False,
    )
    for position, (name, target, text) in enumerate(COMMANDS):
        command: str | Callable[..., int] = target
        if name == "serve" and core is not None:
            from octavo.cli.serve import serving

            command = serving(core)
        usage = f"octavo {name} {_POSITIONAL[name]} [OPTIONS]" if name in _POSITIONAL else None
        app.command(command, name=name, help=text, sort_key=position, usage=usage)
    bench = App(
        name="bench",
        help="Measure throughput, latency, start-up or a server; fit a cost model and check it.",
        sort_key=len(COMMANDS),
    )
    for position, (name, target, text) in enumerate(BENCHMARKS):
        bench.command(target, name=name, help=text, sort_key=position)
    app.command(bench)
    return app


def main(tokens: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    _open_closed_streams()
    words = list(sys.argv[1:] if tokens is None else tokens)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words[:1] in (["version"], ["-v"], ["-V"]):
        words = ["--version"]
    try:
        if (said := _unknown_command(words)) is not None:
            return _fail(said, EXIT_USAGE)
        if words[:1] == ["serve"] and not any(_NO_CORE.fullmatch(word) for word in words):
            with SpawnedCore() as core:  # it imports while the command line is read
                return invoke(build_app(core), _spread(words))
        return invoke(build_app(), _spread(words))
    except KeyboardInterrupt:  # while the command line is read
        return _interrupted()


_OF_OTHER_ENGINES: Final = {
    "ps": "octavo top shows what a server does, octavo list the models of this machine",
    "show": "octavo explain MODEL shows a model's sizes and what a start would do",
    "search": "look for models on the page of a hub; octavo models lists the families that run",
    "stop": "a server stops at Ctrl-C or SIGTERM",
    "create": "give a directory, a GGUF file or a hub name; octavo serve --chat-template FILE sets the chat format",
    "collect-env": "octavo explain shows the machine, the versions and the choices",
    **dict.fromkeys(("generate", "complete", "cli"), 'octavo run "Once upon a time" continues a text'),
    **dict.fromkeys(("start", "server", "launch"), "octavo serve MODEL starts a server"),
    **dict.fromkeys(("download", "get"), "octavo pull MODEL downloads a model"),
    **dict.fromkeys(("ls", "tags"), "octavo list lists the models of this machine"),
    **dict.fromkeys(("remove", "delete"), "octavo rm MODEL removes a model"),
}
"""What octavo has for commands of Ollama, vLLM and llama.cpp."""


def _unknown_command(words: list[str]) -> str | None:
    """Return a message about a first word that is no command, without importing commands; None for any other."""
    names = [*(name for name, *_ in COMMANDS), "bench"]
    if not words or words[0] in (*names, "--help", "-h", "--version"):
        return None
    if words[0].startswith("-"):
        return f"{words[0]} comes before a command; begin with one, as in octavo serve MODEL. `--help` lists them"
    from difflib import get_close_matches

    said = f'Unknown command "{words[0]}". '
    if words[0] in _OF_OTHER_ENGINES:
        return said + _OF_OTHER_ENGINES[words[0]]
    near = get_close_matches(words[0], names, 1)
    return said + (f'Did you mean "{near[0]}"? ' if near else "") + "`--help` lists them"


def _spread(words: list[str]) -> list[str]:
    """Return the words of a command line with the fields of objects joined, and of `octavo serve MODEL` or `octavo
    proxy MODEL` with a flag before each value of a list. Where the model comes last it would be one of them."""
    if any(_FIELD.match(word) for word in words):
        from octavo.cli.options import joined_fields
        from octavo.config.args import EngineArgs

        words = joined_fields(words, EngineArgs)
    if words[:1] not in (["serve"], ["proxy"]) or words[1:2] == [] or words[1].startswith("-"):
        return words
    from octavo.cli.options import one_value_each
    from octavo.config.args import EngineArgs
    from octavo.config.server_args import ServerArgs

    if words[0] == "serve":
        return one_value_each(words, EngineArgs, ServerArgs)
    from octavo.cli.proxy import ProxyOptions

    return one_value_each(words, ProxyOptions, EngineArgs, ServerArgs)


def invoke(app: App, tokens: Sequence[str] | None = None) -> int:
    """Run a tree of commands and return the exit code; what goes wrong becomes one line on stderr."""
    from cyclopts import CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    from octavo.cli.terminal import exchange_any_text

    exchange_any_text()
    try:
        result = app(
            sys.argv[1:] if tokens is None else list(tokens),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        sys.stdout.flush()
    except UnusedCliTokensError as error:
        surplus = " ".join(error.unused_tokens or ())
        remedy = "put several words into quotes, and give an option once for each of its values"
        return _fail(f"{surplus!r} is more than this command takes; {remedy}", EXIT_USAGE)
    except UnknownOptionError as error:
        return _fail(_unknown_option(error), EXIT_USAGE)
    except MissingArgumentError as error:
        return _fail(_missing_argument(error), EXIT_USAGE)
    except CycloptsError as error:
        said = " ".join(str(error).split())
        # of the list of commands cyclopts shows the first few
        said = re.sub(r"Available commands: .*", "`--help` lists them", said)
        return _fail(_wrong_value(error) or said, EXIT_USAGE)
    except ServerUnreachable as error:
        return _fail(f"{error}; start a server there with octavo serve, or check the address", EXIT_ERROR)
    except OctavoError as error:
        return _fail(str(error), EXIT_ERROR)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # the reader went away (`octavo run ... | head`)
        _leave_output()
        return EXIT_ERROR
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _leave_output()
        where = error.filename or "standard output"
        return _fail(f"{where} cannot be written: {error.strerror}; free some space, and try again", EXIT_ERROR)
    return result if isinstance(result, int) else 0


def _open_closed_streams() -> None:
    """Open streams that the caller has closed (`octavo ... >&-`) on the null device: no file or socket gets their
    numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _interrupted() -> int:
    print(file=sys.stderr)
    return EXIT_INTERRUPTED


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _leave_output() -> None:
    """Redirect standard output, so that the interpreter prints no error at exit about unwritten output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_ELSEWHERE = {
    "simulate": {
        "--replay": "a recording is replayed by a command of its own: octavo replay FILE",
        "--svg": "write the report with --output FILE, which `python -m benchmarks.draw FILE PICTURE.svg` of a source "
        "checkout draws; it draws recordings too",
    },
    "run": dict.fromkeys(("--image", "--images"), "octavo chat takes images: octavo chat MODEL --image FILE"),
    "quantize": dict.fromkeys(
        ("--source", "--model", "--output"), "model and directory come without flags: octavo quantize MODEL OUTPUT"
    ),
}
"""For each command: options that it had, or that users may expect there, and where they are."""
_OF_CLIENTS = dict.fromkeys(
    ("--port", "--host"), "the server is named by its address: --url http://127.0.0.1:8000, the default"
)
_ELSEWHERE |= {"top": _OF_CLIENTS, "chat": _OF_CLIENTS}
_ALSO_CALLED = {"--num-requests": "--num-prompts", "--num-prompts": "--num-requests"}
"""Options of benchmarks, by the names that other benchmarks have for them."""


def _unknown_option(error: UnknownOptionError) -> str:
    from difflib import get_close_matches

    from octavo.core.absent import absent_options, renamed_options

    flag = (error.token.keyword or error.token.value).partition("=")[0]
    for command in error.command_chain or ():
        if (said := _ELSEWHERE.get(command, {}).get(flag)) is not None:
            return f"{flag}: {said}"
    name = flag.lstrip("-").partition(".")[0].removeprefix("no-").replace("-", "_")
    options = {option for argument in error.argument_collection for option in argument.names}
    if (other := _ALSO_CALLED.get(flag)) in options:
        return f"{flag}: this command calls it {other}"
    if name in renamed_options():
        return f"{flag}: octavo calls it --{renamed_options()[name].replace('_', '-')}"
    if name in absent_options():
        return f"{flag}: {absent_options()[name]}"
    begun = [option for option in options if option.startswith(flag)]
    if len(begun) == 1:
        return f"Unknown option: {flag}. Did you mean {begun[0]}?"
    near = get_close_matches(flag, options, 1, 0.7)  # what cyclopts takes for near is further away
    remedy = f". Did you mean {near[0]}?" if near else f"; `{_command(error)} --help` lists them"
    unknown = f"Unknown option: {flag}{remedy}"
    return _flag_of_llama_cpp(flag) or _field_of_requests(name, flag, options) or unknown


def _command(error: CycloptsError) -> str:
    return " ".join(("octavo", *(error.command_chain or ())))


def _missing_argument(error: MissingArgumentError) -> str:
    assert error.argument is not None
    said = f"{error.keyword} needs a value" if error.keyword else f"{error.argument.name} is missing"
    return f"{said}; `{_command(error)} --help` shows what it takes"


def _wrong_value(error: CycloptsError) -> str | None:
    """Return a message about a value that users of other engines give to an option, or that is no number; None for any
    other error."""
    from cyclopts import CoercionError

    from octavo.core.absent import value_remark

    if not isinstance(error, CoercionError):
        return None
    token = error.token
    name = None if token is None or token.keyword is None else token.keyword.lstrip("-").replace("-", "_")
    if token is not None and name is not None and (said := value_remark(name, token.value)):
        return f"{token.keyword} {token.value}: {said}"
    return f"{error.msg}; `{_command(error)} --help` shows what it takes" if error.msg else None


def _field_of_requests(name: str, flag: str, options: Collection[str]) -> str | None:
    """Return a message about a sampling parameter given to a command that takes none; None for any other option."""
    from difflib import get_close_matches

    from octavo.core.sampling_params import SamplingParams

    fields = {each for each in SamplingParams.__struct_fields__ if f"--{each.replace('_', '-')}" not in options}
    nearest = get_close_matches(name, [*fields, *(each.lstrip("-").replace("-", "_") for each in options)], 1, 0.8)
    if not nearest or nearest[0] not in fields:
        return None
    return f"Unknown option: {flag}. {nearest[0]} is a field of requests: a client of the server sends it"


def _flag_of_llama_cpp(flag: str) -> str | None:
    """Return a message about a flag of llama-server; None for any other, and one that has the same name here."""
    for spellings, ours, note in llama_cpp_flags():
        if flag != ours and flag in re.split("[,;] ", spellings):
            return f"{flag}: octavo calls it {ours}" if ours else f"{flag} of llama.cpp: {note}"
    return None


def llama_cpp_flags() -> Iterator[tuple[str, str, str]]:
    """Yield spellings, octavo's flag (empty where there is none) and a note, for each flag of llama-server."""
    from importlib.resources import files

    for line in (files("octavo") / "cli" / "llama_cpp_flags.txt").read_text(encoding="utf-8").splitlines():
        spellings, ours, note = [*map(str.strip, line.split(" | ", 2)), ""][:3]
        yield spellings, "" if ours == "-" else ours, note


def _fail(message: str, code: int) -> int:
    from octavo.cli.terminal import say

    say(f"octavo: {message}", sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
