"""`octavo chat`."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.chat import converse
from octavo.cli.chat_models import EngineModel
from octavo.cli.main import EXIT_ERROR, main
from octavo.cli.typed_lines import line_history
from octavo.core.messages import EngineCoreRequest
from octavo.engine.llm_engine import LLMEngine
from tests.fakes.core import ScriptedCore
from tests.fakes.openai_server import FakeOpenAI, chat, serve_openai


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answer(request: EngineCoreRequest, index: int) -> list[int]:
    return [*b"ok", *request.end_token_ids[:1]]


class Keyboard(io.StringIO):
    """A terminal at which lines are typed, and Ctrl-C where one of them is None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lines: str | None) -> None:
        super().__init__()
        self._lines = list(lines)
        monkeypatch.setattr("sys.stdin", self)
        monkeypatch.setattr("builtins.input", self.type_line)

    def isatty(self) -> bool:
        return True

    def type_line(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if line is None:
            press_ctrl_c()
        return line or ""


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@dataclass
class Conversation:
    """Lines are typed to a model, which answers "ok" unless another core is given."""

    make_engine: Callable[[ScriptedCore], LLMEngine]
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    core: ScriptedCore = field(default_factory=lambda: ScriptedCore(reply=answer))

    def type(self, *lines: str, system: str | None = None) -> list[str]:
        """Return all prompts that the core got so far."""
        type_lines(self.patch, *lines)
        return self.talk(system)

    def press(self, *lines: str | None) -> list[str]:
        """The same at a terminal; Ctrl-C is pressed where a line is None."""
        Keyboard(self.patch, *lines)
        return self.talk()

    def talk(self, system: str | None = None) -> list[str]:
        converse(EngineModel(self.make_engine(self.core)), {"max_tokens": 50}, system)
        return self.prompts

    @property
    def prompts(self) -> list[str]:
        return [bytes(request.prompt_token_ids).decode() for request in self.core.requests.values()]

    @property
    def out(self) -> str:
        return self.capsys.readouterr().out

    @property
    def err(self) -> str:
        return self.capsys.readouterr().err


@pytest.fixture
def said(
    make_engine: Callable[[ScriptedCore], LLMEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Conversation:
    return Conversation(make_engine, monkeypatch, capsys)


def test_each_turn_sees_those_before_it(said: Conversation) -> None:
    prompts = said.type("one", "", "two", "/exit", "never", system="be brief")
    assert prompts == ["s:be brief;u:one;", "s:be brief;u:one;a:ok;u:two;"]
    assert said.out == "ok\nok\n"


def test_clear_starts_again_and_keeps_the_system_message(said: Conversation) -> None:
    assert said.type("one", "/clear", "two", system="be brief")[1] == "s:be brief;u:two;"


def test_a_refused_turn_is_told_and_forgotten(said: Conversation) -> None:
    assert said.type("x" * 500, "/nonsense", "two") == ["u:two;"]
    too_long, unknown = said.err.splitlines()
    assert too_long.startswith("octavo: the prompt has 50")
    assert unknown.startswith("octavo: /nonsense is not a command")


def test_ctrl_c_stops_the_answer_and_not_the_conversation(said: Conversation) -> None:
    class PressesCtrlC(ScriptedCore):
        def step(self):  # type: ignore[no-untyped-def]
            if self.num_steps == 1:
                press_ctrl_c()
            return super().step()

    said.core = PressesCtrlC(reply=lambda request, index: [*b"abcdefgh"])
    assert said.type("one", "two")[1] == "u:one;a:ab;u:two;"
    assert said.out == "ab [stopped]\nabcdefgh\n"
    assert len(said.core.aborted) == 1


def test_a_line_that_is_no_text_is_a_refused_turn(said: Conversation) -> None:
    said.patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\ntwo\n"), encoding="utf-8"))
    assert said.talk() == ["u:one;", "u:one;a:ok;u:two;"]
    assert "octavo: messages is no valid Unicode text" in said.err


def test_ctrl_c_at_the_prompt_keeps_the_conversation(said: Conversation) -> None:
    assert said.press("one", None, "two", None, "three")[-1] == "u:one;a:ok;u:two;a:ok;u:three;"
    assert said.err.count("The conversation goes on") == 2


def test_ctrl_c_twice_at_the_prompt_ends_the_conversation(said: Conversation) -> None:
    with pytest.raises(KeyboardInterrupt):
        said.press("one", None, None, "two")
    assert said.prompts == ["u:one;"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_just_after_an_answer_is_harmless(said: Conversation) -> None:
    answered = EngineModel.respond

    def answer_and_press(*arguments: Any) -> str:
        text = answered(*arguments)
        press_ctrl_c()
        return text

    said.patch.setattr(EngineModel, "respond", answer_and_press)
    assert said.press("one", "two")[-1] == "u:one;a:ok;u:two;"


def test_ctrl_c_again_and_again_ends_an_answer_that_does_not_stop(said: Conversation) -> None:
    class Stuck(ScriptedCore):
        def step(self):  # type: ignore[no-untyped-def]
            for _ in range(3):
                press_ctrl_c()
            raise AssertionError("the third one is not put off")

    said.core = Stuck(reply=answer)
    with pytest.raises(KeyboardInterrupt):
        said.press("one")


def test_a_text_of_several_lines_is_one_turn(said: Conversation) -> None:
    lines = ('"""one', "", 'two"""', "three\\")
    assert said.type(*lines) == ["u:one\n\ntwo;", "u:one\n\ntwo;a:ok;u:three\\;"]
    assert said.press("one\\", "two")[-1] == "u:one\ntwo;"


def test_commands_change_the_conversation(said: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    lines = ["/system be kind", "one", "/regenerate", f"/save {file}", "/clear", '/system ""', f"/load {file}", "two"]
    first = "s:be kind;u:one;"
    assert said.type(*lines) == [first, first, f"{first}a:ok;u:two;"]
    file.write_text('{"messages": [{"role": 1}]}')
    said.type(f"/load {file}", "/load", f"/save {tmp_path}", "/regenerate")
    *_, wrong, unnamed, unwritable, unanswered = said.err.splitlines()
    assert "is no conversation of /save: Expected `str`" in wrong
    assert unnamed == "octavo: there is no file name; write one behind the command"
    assert unwritable == f"octavo: {tmp_path} cannot be written: Is a directory"
    assert unanswered == "octavo: there is no message to answer again"
    file.write_bytes(b'{"system": "\xff"}')
    said.type(f"/load {file}")
    assert "is no conversation of /save: " in said.err


def test_sampling_parameters_are_set_by_their_own_validation(said: Conversation) -> None:
    said.type(
        *("/set temperature 0.5", "/set parameter top-p 0.9", "/set stop END", "one", "/set top_p", "/set"),
        *("/set temperature 200", "/set temprature 1", "/set n 2", "two"),
    )
    one, two = (request.params for request in said.core.requests.values())
    assert (one.temperature, one.top_p, one.stop, one.max_tokens) == (0.5, 0.9, ("END",), 50)
    assert (two.temperature, two.top_p) == (0.5, 1.0)
    errors = said.err
    assert 'max_tokens 50\ntemperature 0.5\nstop "END"\n' in errors
    assert "temperature is 200, must be at most 100" in errors
    assert "temprature is not a sampling parameter; did you mean temperature?" in errors
    assert "n has no effect in a conversation; leave it out" in errors


def remote(fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("octavo.cli.chat_models._PAUSES_S", (0.1,) * 2)
    type_lines(monkeypatch, *lines)
    assert main(["chat", "--url", f"127.0.0.1:{fake.port}", "--temperature", "0"]) == 0


def test_a_form_of_the_answers_is_sent_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_openai(FakeOpenAI(lambda body: chat("yes"))) as fake:
        type_lines(monkeypatch, "one")
        form = ["--structured-outputs", '{"choice": ["yes", "no"]}']
        assert main(["chat", "--url", f"127.0.0.1:{fake.port}", *form]) == 0
    assert fake.requests[0]["structured_outputs"]["choice"] == ["yes", "no"]


def test_a_conversation_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_openai(FakeOpenAI(lambda body: chat("he", "llo"))) as fake:
        remote(fake, monkeypatch, "one", "/set top_p 0.5", "two")
    assert capsys.readouterr().out == "hello\nhello\n"
    first, second = fake.requests
    assert first == {
        "model": "fake",
        "messages": [{"role": "user", "content": "one"}],
        "stream": True,
        "temperature": 0.0,
    }
    assert [each["content"] for each in second["messages"]] == ["one", "hello", "two"]
    assert second["top_p"] == 0.5


def test_the_pace_of_an_answer_is_said_on_request(
    said: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one")
    converse(EngineModel(said.make_engine(said.core)), {"max_tokens": 50}, None, is_verbose=True)
    assert re.search(r"\(3 tokens, the first after \d+\.\d\d s, then [\d.]+ per second\)\n", said.err)
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    with serve_openai(FakeOpenAI(lambda body: [*chat("he", "llo"), usage])) as fake:
        type_lines(monkeypatch, "one")
        assert main(["chat", "--url", f"127.0.0.1:{fake.port}", "--verbose"]) == 0
    assert "(9 tokens, the first after " in capsys.readouterr().err
    assert fake.requests[0]["stream_options"] == {"include_usage": True}


def test_images_are_shown_with_the_next_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"first")
    (tmp_path / "b.jpg").write_bytes(b"second")
    lines = ["one", "two", f"/image {tmp_path / 'b.jpg'}", f"/image {tmp_path / 'none'}", "/image", "three"]
    with serve_openai(FakeOpenAI(lambda body: chat("ok"))) as fake:
        type_lines(monkeypatch, *lines)
        assert main(["chat", "--url", f"127.0.0.1:{fake.port}", "--image", str(tmp_path / "a.png")]) == 0
    contents = [each["content"] for each in fake.requests[-1]["messages"] if each["role"] == "user"]

    def shown(url: str, text: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]

    assert contents == [
        shown("data:image/png;base64,Zmlyc3Q=", "one"),
        "two",
        shown("data:image/jpeg;base64,c2Vjb25k", "three"),
    ]
    errors = capsys.readouterr().err
    assert f"{tmp_path / 'none'} cannot be read: No such file" in errors
    assert "there is no file name" in errors


def test_a_file_that_is_no_image_loads_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate((20 << 20) + 1)
    assert main(["chat", "--image", str(tmp_path / "large")]) == 1
    assert "has more than 20,971,520 bytes" in capsys.readouterr().err


def test_lost_connections_keep_the_talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(body: dict[str, Any]) -> list[Any]:
        return [*chat("he"), None] if len(fake.requests) == 2 or len(fake.requests) > 4 else chat("hello")

    with serve_openai(FakeOpenAI(reply)) as fake:
        remote(fake, monkeypatch, "one", "two", "three", "four")
    captured = capsys.readouterr()
    assert captured.out == "hello\nhehello\nhello\nhehehe"
    assert captured.err.count("the request is sent again in 0.1 s") == 3
    assert [each["content"] for each in fake.requests[4]["messages"]] == [
        *("one", "hello", "two", "hello", "three", "hello", "four")
    ]


def test_what_a_server_refuses_is_said_and_a_flag_of_an_engine_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_openai(FakeOpenAI(lambda body: [401])) as fake:
        remote(fake, monkeypatch, "one")
        assert re.search("responds with 401: refused.*; --api-key-file names", capsys.readouterr().err)
        assert main(["chat", "--url", f"127.0.0.1:{fake.port}", "--block-size", "8"]) == EXIT_ERROR
    assert "block_size has no effect with url" in capsys.readouterr().err
    with serve_openai(FakeOpenAI(pages={})) as fake:
        assert main(["chat", "--url", f"127.0.0.1:{fake.port}"]) == EXIT_ERROR
    assert "responds with 404: Not Found" in capsys.readouterr().err


@pytest.mark.parametrize(
    "event",
    [
        *({"choices": value} for value in (5, [5], [{"delta": 5}])),
        b'{"choices": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_events_of_another_shape_are_a_refused_turn(
    event: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_openai(FakeOpenAI(lambda body: [event])) as fake:
        remote(fake, monkeypatch, "one")
    assert "sends an event that is no" in capsys.readouterr().err


def test_lines_are_kept_and_only_for_their_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import readline

    readline.clear_history()
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}", Keyboard(monkeypatch))
    file = tmp_path / "octavo" / "chat_history"
    with line_history(file.parent):
        for number in range(1100):
            readline.add_history(f"line {number}")
    assert len(file.read_text().splitlines()) == 1000
    assert file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with line_history(None):
        assert readline.get_current_history_length() == 0
