"""What commands say before they load a model."""

from __future__ import annotations

import logging

import pytest

from octavo.cli.start import log_quietly, mention_demonstration_model
from octavo.config.args import EngineArgs


def test_the_demonstration_model_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    mention_demonstration_model(EngineArgs())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "demonstration" in captured.err


def test_a_real_model_gets_no_such_line(capsys: pytest.CaptureFixture[str]) -> None:
    mention_demonstration_model(EngineArgs(model="owner/model"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("asked", "level"), [("info", logging.WARNING), ("debug", logging.DEBUG), ("error", logging.ERROR)]
)
def test_log_lines_are_for_those_who_ask(asked: str, level: int) -> None:
    log_quietly(EngineArgs(log_level=asked))
    assert logging.getLogger("octavo").level == level
