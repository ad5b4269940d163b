"""The responses of `POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct


class DurationUsage(Struct, frozen=True):
    """What a sound counts for: its length."""

    seconds: float
    type: Literal["duration"] = "duration"


class SpeechUsage(Struct, frozen=True):
    """The tokens of prompts and texts of all windows."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class Transcription(Struct, frozen=True):
    """The response in the format json."""

    text: str
    usage: DurationUsage


class SpeechSegment(Struct, frozen=True):
    """A piece of text with its times in seconds. `seek`: where its window begins, in hundredths of a second."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class VerboseTranscription(Struct, frozen=True):
    """The response in the format verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpeechSegment]
    usage: DurationUsage


class TextDelta(Struct, frozen=True):
    """An event of a stream: more text."""

    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class TextDone(Struct, frozen=True):
    """The last event of a stream: the whole text."""

    text: str
    usage: SpeechUsage
    type: Literal["transcript.text.done"] = "transcript.text.done"


def subtitles(segments: Iterable[SpeechSegment], kind: Literal["srt", "vtt"]) -> str:
    """Return segments as subtitles in SubRip's format or in WebVTT."""
    mark, lines = (",", []) if kind == "srt" else (".", ["WEBVTT\n"])
    for number, each in enumerate(segments, 1):
        times = f"{_time(each.start, mark)} --> {_time(each.end, mark)}"
        head = f"{number}\n" if kind == "srt" else ""
        # an arrow in the text would be read as times
        lines.append(f"{head}{times}\n{each.text.strip().replace('-->', '->')}\n")
    return "\n".join(lines) + "\n"


def _time(seconds: float, mark: str) -> str:
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
