"""A progress bar on stderr for a batch of prompts."""

from __future__ import annotations

import sys
import time
from typing import Final, Self, TextIO

_REFRESH_INTERVAL_S: Final = 0.1


class ProgressBar:
    """One line: prompts done, time taken and left, tokens per second in and out.

    shown: None shows it only where the stream (by default stderr) is a terminal.
    """

    def __init__(self, num_prompts: int, *, shown: bool | None = None, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._bar = None
        if not (stream.isatty() if shown is None else shown):
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.completed}/{task.total} prompts"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(file=stream),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=num_prompts, speed="")
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, num_done: int, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Show totals since the start of the batch."""
        if self._bar is None:
            return
        now = time.monotonic()
        elapsed_s = max(now - self._start, 1e-6)
        speed = f"{num_prompt_tokens / elapsed_s:.0f} tokens/s in, {num_generated_tokens / elapsed_s:.0f} out"
        self._bar.update(self._task, completed=num_done, speed=speed)
        if now - self._last >= _REFRESH_INTERVAL_S:
            self._last = now
            self._bar.refresh()
