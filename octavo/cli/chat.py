"""`octavo chat`: a conversation on the terminal."""

from __future__ import annotations

import base64
import mimetypes
import sys
from collections.abc import Sequence
from contextlib import closing
from os.path import expanduser
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.cli.chat_models import ChatModel, EngineModel, ServerModel
from octavo.cli.openai_client import OpenAIClient, read_api_key
from octavo.cli.options import NOT_FOR_A_TERMINAL, Given, with_options
from octavo.cli.pace import Pace
from octavo.cli.start import load, with_adapter
from octavo.cli.terminal import WordWrap, say
from octavo.cli.typed_lines import TypedLines, line_history
from octavo.config.args import EngineArgs
from octavo.config.fields import Arguments, arg
from octavo.config.sources import user_directory
from octavo.core.sampling_params import SamplingParams, documented_fields
from octavo.engine.interrupt import interrupt_handler
from octavo.errors import ConfigError, InvalidRequest, OctavoError

_HELP: Final = "/help lists the commands, /exit or Ctrl-C twice ends, Ctrl-C stops an answer."
_COMMANDS: Final = """\
/set [NAME [VALUE]]  show the sampling parameters that are set, set one, or (without a value) take its default again
/system [TEXT]       show the system message, or set it; "" removes it
/image FILE          show an image with the next message
/regenerate          answer the last message once more
/clear               start a new conversation
/save FILE           write the conversation to a file, /load FILE reads one
/exit                end, as do Ctrl-D and Ctrl-C twice
\"\"\"                  begins and ends a text of several lines; a \\ at the end of a line goes on in the next one"""
_ALIASES: Final = {"/bye": "/exit", "/quit": "/exit", "/regen": "/regenerate", "/?": "/help"}
_MAX_FILE: Final = 256 << 20


class ChatOptions(Arguments, heading="Prompt"):
    """How a conversation begins, and with whom."""

    system: str | None = arg(None, "System message: the role of the model in the conversation.")
    url: str | None = arg(None, "Talk to a server of the OpenAI API at this address; no model is loaded.")
    api_key_file: str | None = arg(None, "With --url: file whose first line is the API key.")
    image: tuple[str, ...] = arg((), "Image file to show with the first message; repeat for more.")
    lora: str | None = arg(None, "Folder of an adapter (LoRA, as PEFT saves it) to use.")
    verbose: bool = arg(False, "Write after each answer how many tokens it has and how fast they came.")
    history: bool = arg(True, "Keep what is typed, in octavo/chat_history of the user's data folder.")


@with_options(ChatOptions, SamplingParams, EngineArgs, model="positional", without=("n",))
def chat(*, given: Given) -> None:
    """Talk to a model; each answer is written as it is generated."""
    options = given.own(ChatOptions)
    values = given.sampling_values
    given.sampling({"max_tokens": None})  # raises for wrong flags before a model is loaded
    images = [image_part(Path(name)) for name in options.image]
    model: ChatModel
    if options.url is None:
        args, adapter = with_adapter(given.arguments(EngineArgs), options.lora)
        model = EngineModel(load(args), adapter)
    else:
        if options.lora is not None:
            raise ConfigError("lora has no effect with url: name the server's adapter with model")
        idle = sorted(given.values_of(EngineArgs).keys() - {"model", *values})
        if idle:
            raise ConfigError(f"{idle[0]} has no effect with url: the engine is that of the server; leave it out")
        server = OpenAIClient(options.url, read_api_key(options.api_key_file))
        model = ServerModel(server, given.values.get("model"), lambda text: say(f"\noctavo: {text}", sys.stderr))
        say(f"{model.name} at {server.address}", sys.stderr)
    model.sampling(values)
    with line_history(user_directory("data") if options.history else None):
        converse(model, values, options.system, images, is_verbose=options.verbose)


def converse(
    model: ChatModel,
    values: dict[str, Any],
    system: str | None,
    images: Sequence[dict[str, Any]] = (),
    *,
    is_verbose: bool = False,
) -> None:
    """Read turns and write responses, until /exit or the end of the input. A refused turn is dropped.

    images: the parts of the first message before its text. is_verbose: whether the pace of each answer is written.
    Raises KeyboardInterrupt for Ctrl-C twice at the prompt; once keeps the conversation.
    """
    lines, was_interrupted = TypedLines(), False
    conversation = Conversation(model, values, system, lines, is_verbose=is_verbose)
    conversation.images.extend(images)
    if lines.is_terminal:
        say(_HELP, sys.stderr)
    with interrupt_handler(lines.handle):
        while True:
            try:
                line = lines.read()
            except KeyboardInterrupt:
                if was_interrupted or not lines.is_terminal:
                    raise
                was_interrupted = True
                say("\nThe conversation goes on; Ctrl-C again, or /exit, ends it.", sys.stderr)
                continue
            was_interrupted = False
            if line is None:
                return
            name, _, rest = line.partition(" ")
            name = _ALIASES.get(name, name)
            if name == "/exit":
                return
            try:
                if line.startswith("/") and "\n" not in line:
                    conversation.command(name, rest.strip())
                elif line:
                    conversation.say(line)
            except OctavoError as error:
                say(f"octavo: {error}", sys.stderr)


class Conversation:
    """Messages, the sampling parameters that are set, and the commands that change them."""

    def __init__(
        self,
        model: ChatModel,
        values: dict[str, Any],
        system: str | None,
        lines: TypedLines,
        *,
        is_verbose: bool = False,
    ) -> None:
        self._is_verbose = is_verbose
        self._model, self._values, self._system, self._lines = model, dict(values), system, lines
        self._messages: list[dict[str, Any]] = []
        self.images: list[dict[str, Any]] = []
        """Parts of the next message, before its text."""

    def say(self, text: str) -> None:
        """Respond to a text; both become part of the conversation. Raises OctavoError, and is then as before, but for
        the images of the text, which are forgotten."""
        images, self.images = self.images, []
        turn = {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}
        answer = self._respond([*self._messages, turn])
        self._messages += [turn, {"role": "assistant", "content": answer}]

    def command(self, name: str, rest: str) -> None:
        """Carry out a command. Raises OctavoError."""
        commands = {
            "/help": lambda rest: say(_COMMANDS, sys.stderr),
            "/image": lambda rest: self.images.append(image_part(_file_of(rest))),
            "/set": self._set,
            "/system": self._set_system,
            "/regenerate": self._regenerate,
            "/clear": lambda rest: self._messages.clear(),
            "/save": self._save,
            "/load": self._load,
        }
        if name not in commands:
            raise InvalidRequest(f"{name} is not a command; {_HELP}")
        commands[name](rest)

    def _respond(self, messages: list[dict[str, Any]]) -> str:
        """Write the model's response to standard output and return it; Ctrl-C ends it."""
        start = [{"role": "system", "content": self._system}] if self._system else []
        pace = Pace() if self._is_verbose else None
        with closing(WordWrap(sys.stdout)) as screen:
            answer = self._model.respond([*start, *messages], self._values, screen.write, self._lines, pace)
        sys.stdout.write(" [stopped]\n" if self._lines.requested else "\n")
        if pace is not None:
            say(f"({pace})", sys.stderr)
        return answer

    def _regenerate(self, rest: str) -> None:
        if not self._messages:
            raise InvalidRequest("there is no message to answer again")
        answer = self._respond(self._messages[:-1])
        self._messages[-1] = {"role": "assistant", "content": answer}

    def _set(self, rest: str) -> None:
        name, _, text = rest.removeprefix("parameter ").partition(" ")
        name = name.replace("-", "_")
        if not name:
            shown = [f"{key} {msgspec.json.encode(value).decode()}" for key, value in self._values.items()]
            say("\n".join(shown) or "nothing is set: the model's own defaults apply", sys.stderr)
            return
        values = {key: value for key, value in self._values.items() if key != name}
        if name in ("n", *NOT_FOR_A_TERMINAL):
            raise InvalidRequest(f"{name} has no effect in a conversation; leave it out", field=name)
        if not text.strip():
            if name not in documented_fields():
                self._model.sampling({name: None})  # names the nearest
            self._values = values
            return
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text.strip()  # a word, such as never, or a stop string
        values[name] = value
        self._model.sampling(values)
        self._values = values

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = None if rest == '""' else rest
        else:
            say(self._system or "there is no system message", sys.stderr)

    def _save(self, rest: str) -> None:
        body = {"system": self._system, "messages": self._messages, "sampling": self._values}
        try:
            Path(_file_of(rest)).write_bytes(msgspec.json.format(msgspec.json.encode(body)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{rest} cannot be written: {error.strerror}") from error

    def _load(self, rest: str) -> None:
        try:
            with _file_of(rest).open("rb") as file:
                saved = msgspec.json.decode(file.read(_MAX_FILE), type=_Saved)
        except OSError as error:
            raise ConfigError(f"{rest} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{rest} is no conversation of /save: {error}") from error
        self._model.sampling(saved.sampling)
        self._system, self._values = saved.system, saved.sampling
        self._messages = [{"role": each.role, "content": each.content} for each in saved.messages]
        say(f"{len(saved.messages)} messages", sys.stderr)


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_Message]
    system: str | None = None
    sampling: dict[str, Any] = {}


def _file_of(text: str) -> Path:
    if not text:
        raise InvalidRequest("there is no file name; write one behind the command")
    return Path(expanduser(text))


_MOST_IMAGE_BYTES: Final = 20 << 20
"""Most bytes of an image file; models are given no larger images."""


def image_part(path: Path) -> dict[str, Any]:
    """Return the part of a message that an image file is. Raises ConfigError or InvalidRequest."""
    try:
        with open(expanduser(path), "rb") as file:
            data = file.read(_MOST_IMAGE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MOST_IMAGE_BYTES:
        raise InvalidRequest(f"{path} has more than {_MOST_IMAGE_BYTES:,} bytes, the limit of an image; scale it down")
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}
