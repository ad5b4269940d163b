"""`octavo run`."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.main import EXIT_ERROR, main
from octavo.cli.run import _model_and_prompt, _write_one, _write_several
from octavo.config.args import EngineArgs
from octavo.core.messages import EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.errors import CheckpointError, ContextTooLong
from tests.cli.conftest import Command
from tests.fakes.core import ScriptedCore

MakeEngine = Callable[[ScriptedCore], LLMEngine]
LONG = SamplingParams(max_tokens=50)


class Screen(io.StringIO):
    """Standard output that remembers what a reader had seen at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        if not self.seen or self.seen[-1] != self.getvalue():
            self.seen.append(self.getvalue())


def test_text_is_written_as_it_is_generated(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    _write_one(make_engine(ScriptedCore()), "abc", LONG)
    assert screen.seen == ["abc", "abca", "abcab", "abcabc"]
    assert screen.getvalue() == "abcabc\n"


def test_a_refused_prompt_is_not_written(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ContextTooLong):
        _write_one(make_engine(ScriptedCore()), "abc", SamplingParams(max_tokens=1000))
    assert capsys.readouterr().out == ""


def test_several_texts_are_written_apart(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(request: EngineCoreRequest, index: int) -> list[int]:
        return [ord("x") + index] * 2

    _write_several(make_engine(ScriptedCore(reply=reply)), "p", SamplingParams(n=2, max_tokens=50))
    assert capsys.readouterr().out == "[1] pxx\n[2] pyy\n"


def test_only_the_texts_that_a_search_finds_are_written(tiny_model: str, command: Command) -> None:
    line = ["run", "abc", "--model", tiny_model, "--max-tokens", "2", "--max-num-seqs", "4", "--use-beam-search"]
    assert command(*line, "--n", "3", "--allowed-token-ids", "97").out == "[1] abcaa\n"


def test_a_model_on_disk_continues_a_text(tiny_model: str, command: Command) -> None:
    line = ["run", "abc", "--model", tiny_model, "--max-tokens", "4", "--temperature", "0", "--max-num-seqs", "4"]
    first = command(*line)
    assert first.out.startswith("abc")
    assert first.out.endswith("\n")
    assert "demonstration" not in first.err
    assert command(*line).out == first.out
    assert "per second" not in first.err
    assert "(4 tokens, the first after " in command(*line, "--verbose").err


def test_the_first_of_two_words_is_the_model(tiny_model: str, command: Command) -> None:
    assert command("run", tiny_model, "abc", "--max-tokens", "1", "--max-num-seqs", "4").out.startswith("abc")


def test_a_word_that_names_a_model_is_none(tiny_model: str, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    assert command("run", tiny_model, "--max-tokens", "1", "--max-num-seqs", "4").out.startswith("abc")


def test_a_file_or_folder_of_gguf_alone_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc")))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for model in (tmp_path / "m.gguf", tmp_path):
        assert "m.gguf: truncated or damaged" in command("run", str(model), code=EXIT_ERROR).err


def test_a_prompt_may_be_longer_than_a_name_of_a_file(command: Command) -> None:
    text = "a b " * 100
    assert _model_and_prompt(text, None, None) == (None, text)
    said = command("run", text, "abc", code=EXIT_ERROR).err
    assert "before the prompt names no model (a hub name, a directory, a GGUF file or octavo-tiny)" in said
    assert "cannot be looked for (File name too long)" in command("explain", "a" * 300, code=EXIT_ERROR).err


def test_beside_a_named_model_every_word_is_the_prompt(tiny_model: str, command: Command) -> None:
    assert command("run", "and/or", "--model", tiny_model, "--max-tokens", "1", "--max-num-seqs", "4").out.startswith(
        "and/or"
    )


def test_a_file_before_the_prompt_is_taken_as_the_model(tmp_path: Path, command: Command) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert (
        "m.gguf: truncated or damaged (the version ends at byte 8"
        in command("run", str(tmp_path / "m.gguf"), "Once upon a time", code=EXIT_ERROR).err
    )


def test_a_word_that_is_no_model_after_all_may_have_been_a_part_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(args: EngineArgs, prompt: str) -> LLMEngine:
        raise CheckpointError(f"{args.model}: there is no such model")

    monkeypatch.setattr("octavo.cli.run.load", load)
    assert main(["run", "Once", "upon"]) == EXIT_ERROR
    said = "Once: there is no such model (if Once is a part of the prompt, put all of that into quotes)"
    assert said in capsys.readouterr().err


def test_min_tokens_is_not_refused_for_a_limit_that_nobody_set(tiny_model: str, command: Command) -> None:
    line = ["run", "abc", "--model", tiny_model, "--max-num-seqs", "4", "--allowed-token-ids", "97"]
    assert main([*line, "--min-tokens", "30"]) == 0
    assert (
        "min_tokens is 3000, but behind a prompt of 3 tokens the context has room for"
        in command(*line, "--min-tokens", "3000", code=EXIT_ERROR).err
    )


def test_prompts_come_from_standard_input(tiny_model: str, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    assert command("run", "--model", tiny_model, "--max-tokens", "1", "--max-num-seqs", "4").out.startswith(
        "from a pipe"
    )


@pytest.mark.parametrize(("words", "given"), [(["run"], b""), (["run"], b"\n"), (["run", ""], b"unread")])
def test_an_empty_prompt_is_refused_before_the_weights_are_read(
    words: list[str], given: bytes, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    monkeypatch.setattr(LLMEngine, "build", None)
    assert "the prompt is empty; give one" in command(*words, code=EXIT_ERROR).err


def test_without_a_prompt_a_terminal_says_what_to_write(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert "there is no prompt" in command("run", code=EXIT_ERROR).err


def test_input_that_is_no_utf_8_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff"), encoding="utf-8"))
    assert "standard input is no utf-8 text: the byte 0xff at position 3" in command("run", code=EXIT_ERROR).err
    # the command line, and standard input where the locale is C
    assert "lone surrogate (U+DCFF)" in command("run", "abc\udcff", code=EXIT_ERROR).err
