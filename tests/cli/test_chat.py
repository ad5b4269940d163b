"""`octavo chat`."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from octavo.cli import chat
from octavo.cli.chat import converse
from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from tests.fakes.core import ScriptedCore

MakeEngine = Callable[[ScriptedCore], LLMEngine]
PARAMS = SamplingParams(max_tokens=50)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def prompts(core: ScriptedCore) -> list[str]:
    return [bytes(request.prompt_token_ids).decode() for request in core.requests.values()]


def answer(request: EngineCoreRequest, index: int) -> list[int]:
    return [*b"ok", *request.end_token_ids[:1]]


def test_each_turn_sees_those_before_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = ScriptedCore(reply=answer)
    type_lines(monkeypatch, "one", "", "two", "/exit", "never")
    converse(make_engine(core), PARAMS, "be brief")
    assert prompts(core) == ["s:be brief;u:one;", "s:be brief;u:one;a:ok;u:two;"]
    assert capsys.readouterr().out == "ok\nok\n"


def test_clear_starts_again_and_keeps_the_system_message(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ScriptedCore(reply=answer)
    type_lines(monkeypatch, "one", "/clear", "two")
    converse(make_engine(core), PARAMS, "be brief")
    assert prompts(core)[1] == "s:be brief;u:two;"


def test_a_refused_turn_is_told_and_forgotten(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = ScriptedCore(reply=answer)
    type_lines(monkeypatch, "x" * 500, "/nonsense", "two")
    converse(make_engine(core), PARAMS, None)
    assert prompts(core) == ["u:two;"]
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("octavo: the prompt has 50")
    assert errors[1].startswith("octavo: /nonsense is not a command")


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PressesCtrlC(ScriptedCore):
        def step(self):  # type: ignore[no-untyped-def]
            if self.num_steps == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().step()

    core = PressesCtrlC(reply=lambda request, index: [*b"abcdefgh"])
    type_lines(monkeypatch, "one", "two")
    converse(make_engine(core), PARAMS, None)
    assert capsys.readouterr().out == "ab [stopped]\nabcdefgh\n"
    assert prompts(core)[1] == "u:one;a:ab;u:two;"
    assert len(core.aborted) == 1


def test_a_line_that_is_no_text_is_a_refused_turn(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = ScriptedCore(reply=answer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\ntwo\n"), encoding="utf-8"))
    converse(make_engine(core), PARAMS, None)
    assert prompts(core) == ["u:one;", "u:one;a:ok;u:two;"]
    assert "octavo: messages is no valid Unicode text" in capsys.readouterr().err


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


def test_ctrl_c_at_the_prompt_keeps_the_conversation(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = ScriptedCore(reply=answer)
    Keyboard(monkeypatch, "one", None, "two", None, "three")
    converse(make_engine(core), PARAMS, None)
    assert prompts(core)[-1] == "u:one;a:ok;u:two;a:ok;u:three;"
    assert capsys.readouterr().err.count("The conversation goes on") == 2


def test_ctrl_c_twice_at_the_prompt_ends_the_conversation(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ScriptedCore(reply=answer)
    Keyboard(monkeypatch, "one", None, None, "two")
    with pytest.raises(KeyboardInterrupt):
        converse(make_engine(core), PARAMS, None)
    assert prompts(core) == ["u:one;"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_just_after_an_answer_is_harmless(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore(reply=answer)
    Keyboard(monkeypatch, "one", "two")
    answered = chat._answer

    def answer_and_press(*arguments: Any) -> str:
        text = answered(*arguments)
        press_ctrl_c()
        return text

    monkeypatch.setattr(chat, "_answer", answer_and_press)
    converse(make_engine(core), PARAMS, None)
    assert prompts(core)[-1] == "u:one;a:ok;u:two;"


def test_ctrl_c_again_and_again_ends_an_answer_that_does_not_stop(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(ScriptedCore):
        def step(self):  # type: ignore[no-untyped-def]
            for _ in range(3):
                press_ctrl_c()
            raise AssertionError("the third one is not put off")

    Keyboard(monkeypatch, "one")
    with pytest.raises(KeyboardInterrupt):
        converse(make_engine(Stuck(reply=answer)), PARAMS, None)
