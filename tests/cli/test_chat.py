"""`octavo chat`."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable

import pytest

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
