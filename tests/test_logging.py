"""Logging is set up by call and leaves other loggers alone."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from octavo.logging import set_up


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("octavo")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_a_line_holds_role_level_and_message() -> None:
    stream = io.StringIO()
    set_up("info", role="core", stream=stream)
    logging.getLogger("octavo.engine").info("ready")
    logging.getLogger("octavo.engine").debug("unseen")
    assert stream.getvalue().endswith(" core INFO ready\n")
    assert stream.getvalue().count("\n") == 1


def test_a_second_call_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up(stream=first)
    set_up(stream=second)
    logging.getLogger("octavo").warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_the_root_logger_is_left_alone() -> None:
    before = logging.getLogger().handlers[:]
    set_up(stream=io.StringIO())
    assert logging.getLogger().handlers == before
