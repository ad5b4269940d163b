"""A progress bar on stderr for a batch of prompts."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Final, Self, TextIO

REFRESH_INTERVAL_S: Final = 0.1
_NARROWEST_BAR: Final = 5
"""Characters; where there is less room the facts stand alone."""


class ProgressBar:
    """One line that is written over and over: prompts done, time taken and left, tokens per second in and out."""

    def __init__(
        self,
        num_prompts: int,
        *,
        shown: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """shown: None means only when the stream is a terminal."""
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty() if shown is None else shown
        self._num_prompts = num_prompts
        self._clock = clock
        self._start = self._last = clock()
        self._counts = (0, 0, 0)
        self._line_length = 0
        self._mark = _mark(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._write(self._clock())
            self._stream.write("\n")
            self._stream.flush()

    def update(self, num_done: int, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Totals since the start of the batch."""
        self._counts = (num_done, num_prompt_tokens, num_generated_tokens)
        now = self._clock()
        if self._shown and now - self._last >= REFRESH_INTERVAL_S:
            self._last = now
            self._write(now)
            self._stream.flush()

    def _write(self, now: float) -> None:
        """Write the line over the last one, with blanks where that one was longer."""
        line = self._line(now)
        self._stream.write(f"\r{line.ljust(self._line_length)}")
        self._line_length = len(line)

    def _line(self, now: float) -> str:
        num_done, num_prompt_tokens, num_generated_tokens = self._counts
        elapsed_s = max(now - self._start, 1e-6)
        left = _clock_time(elapsed_s / num_done * (self._num_prompts - num_done)) if num_done else "?"
        facts = (
            f" {num_done}/{self._num_prompts} prompts [{_clock_time(elapsed_s)}<{left}, "
            f"in {num_prompt_tokens / elapsed_s:.0f} tokens/s, out {num_generated_tokens / elapsed_s:.0f} tokens/s]"
        )
        columns = shutil.get_terminal_size().columns - 1  # a terminal may move on when the last one is written
        width = min(40, columns - len(facts) - 2)
        if width < _NARROWEST_BAR:
            return facts[1 : columns + 1]
        filled = width * num_done // self._num_prompts if self._num_prompts else width
        return f"|{self._mark * filled}{' ' * (width - filled)}|{facts}"


def _mark(stream: TextIO) -> str:
    """Return a block, or what a terminal without blocks has."""
    try:
        "█".encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "#"
    return "█"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
