"""Logging is set up by call and leaves other loggers alone."""

from __future__ import annotations

import io
import logging

from octavo.config.explain import render_bar
from octavo.logging import escaped, set_up


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


def test_no_text_imitates_a_line_or_steers_the_terminal() -> None:
    stream = io.StringIO()
    set_up(role="server", stream=stream)
    forged = "x\n12:00:00.000 server INFO forged\r\x1b[2J\x7f\x9b\u202e\u00e9\ud800"
    try:
        raise ValueError(forged)
    except ValueError:
        logging.getLogger("octavo").exception("failed: %s", forged)
    first, *others = stream.getvalue().splitlines()
    assert first.endswith("server ERROR failed: x")
    assert all(line.startswith("    ") for line in others)
    assert others[0] == r"    12:00:00.000 server INFO forged\r\x1b[2J\x7f\x9b\u202e\xe9\ud800"
    assert all(line.isascii() and line.isprintable() for line in others)


def test_the_bar_of_the_memory_plan_is_shown() -> None:
    stream = io.StringIO()
    set_up(stream=stream)
    logging.getLogger("octavo").info("plan\n  %s\u2588\u00e9", render_bar([0.25, 0.5], 8))
    assert stream.getvalue().splitlines()[1] == r"      ██▓▓▓▓░░█\xe9"


def test_escaped_text_is_one_line() -> None:
    assert escaped("a\nb\tc\0d") == r"a\nb\tc\x00d"
