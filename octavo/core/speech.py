"""The control tokens of a model that transcribes speech: task and language in the prompt, timestamps in the output."""

from __future__ import annotations

import msgspec

SECONDS_PER_TIMESTAMP = 0.02
"""Seconds between two neighbouring timestamp tokens."""


class SpeechTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of Whisper.

    start: begins a prompt, before language and task. languages: by code (`en`), and tasks: transcribe and translate;
    both are empty in a model of English alone. no_timestamps: ends a prompt whose output has no timestamps;
    the id behind it stands for 0 s. no_speech: follows `start` if nothing is said. previous: begins the text before the
    window; None for a model without it. end: ends the output.
    suppressed: never drawn. suppressed_first: not drawn as first token. max_initial: the latest first timestamp, in
    steps; None for any.
    """

    start: int
    end: int
    no_timestamps: int
    languages: dict[str, int] = {}
    tasks: dict[str, int] = {}
    previous: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    max_initial: int | None = 50

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        return self.no_timestamps - 1

    @property
    def asks_for_timestamps(self) -> frozenset[int]:
        """The last tokens of prompts whose output has timestamps."""
        return frozenset(self.tasks.values()) or frozenset({self.start})

    def prompt(self, language: str | None, task: str, *, timestamps: bool) -> list[int]:
        """Return the prompt for a language by its code, and a task; both are left out where there are none."""
        ids = [self.start]
        if self.languages:
            ids += [self.languages[language or "en"], self.tasks[task]]
        return ids if timestamps else [*ids, self.no_timestamps]
