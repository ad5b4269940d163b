"""A sound is written down window by window: silence is passed over, and what is unlikely is drawn once more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.core.media import MediaInput
from octavo.core.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.speech import SpeechTokens
from octavo.multimodal.processors.log_mel import LogMel
from octavo.server.routes.audio import subtitles
from octavo.server.speech.transcription import SpeechSegment, Transcriber

END, STAMP = 130, 139
TOKENS = SpeechTokens(
    start=131, end=END, no_timestamps=138, languages={"en": 132, "fr": 133},
    tasks={"transcribe": 134, "translate": 135}, previous=136,
)  # fmt: skip
Script = Callable[[int, SamplingParams], tuple[list[int], float]]
"""Returns tokens and mean log-probability for a window by its number."""


class FakeModel:
    """Answers what the script says, and remembers prompts by window."""

    def __init__(self, script: Script, no_speech: float = 0.0, language: int = 133) -> None:
        self.script, self.no_speech, self.language = script, no_speech, language
        self.windows: list[bytes] = []
        self.prompts: list[tuple[int, list[int], float]] = []

    async def ask(self, prompt: list[int], media: MediaInput, params: SamplingParams) -> RequestOutput:
        if media.digest not in self.windows:
            self.windows.append(media.digest)
        window, prompt_logprobs, logprob, ids = self.windows.index(media.digest), None, 0.0, [self.language]
        if params.prompt_logprobs is not None:
            described = Logprob(math.log(self.no_speech or 1e-9), 1, "")
            prompt_logprobs = [None, {TOKENS.no_speech: described}]
        elif params.allowed_token_ids is None:
            self.prompts.append((window, prompt, params.temperature))
            ids, logprob = self.script(window, params)
        output: Any = CompletionOutput(index=0, text="", token_ids=ids, cumulative_logprob=logprob * len(ids))
        return RequestOutput(
            request_id="", prompt=None, prompt_token_ids=prompt, outputs=[output], finished=True,
            prompt_logprobs=prompt_logprobs,
        )  # fmt: skip


def run(model: FakeModel, seconds: float, **options: Any) -> list[SpeechSegment]:
    settings = LogMel(100, 50, feature_size=4)
    num_frames = round(seconds * 100)
    features = np.random.default_rng(0).random((4, max(100, num_frames)), np.float32)
    sound = Transcriber(
        TOKENS, settings, features, num_frames, model.ask, lambda ids: "".join(map(chr, ids)), 96,
        **{"task": "transcribe", "timestamps": True} | options,
    )  # fmt: skip

    async def collect() -> list[SpeechSegment]:
        return [each async for window in sound.segments() for each in window]

    return asyncio.run(collect())


def text(*letters: str) -> list[int]:
    return [ord(each) for each in letters]


def test_the_next_window_begins_where_the_last_piece_ends() -> None:
    def script(window: int, params: SamplingParams) -> tuple[list[int], float]:
        if window < 2:
            return [STAMP, *text("a"), STAMP + 30, STAMP + 30, *text("x")], -0.5
        return [STAMP, *text("b"), STAMP + 40, END], -0.5

    model = FakeModel(script)
    found = run(model, 2.0)
    assert [(each.seek, each.start, each.end, each.text) for each in found] == [
        (0, 0.0, 0.6, "a"),
        (60, 0.6, 1.2, "a"),
        (120, 1.2, 2.0, "b"),
    ]
    assert [each.id for each in found] == [0, 1, 2]
    assert [prompt for _, prompt, _ in model.prompts] == [[131, 133, 134]] * 3


def test_unlikely_and_repeating_texts_are_drawn_at_higher_temperatures() -> None:
    def script(window: int, params: SamplingParams) -> tuple[list[int], float]:
        if params.temperature < 0.3:
            return text("a"), -1.5
        return text(*"la " * 20 if params.temperature < 0.5 else "good"), -0.2

    model = FakeModel(script)
    [found] = run(model, 0.7, timestamps=False, language="en")
    assert [temperature for _, _, temperature in model.prompts] == [0.0, 0.2, 0.4, 0.6]
    assert (found.text, found.temperature, found.end) == ("good", 0.6, 0.7)
    assert model.prompts[0][1] == [131, 132, 134, 138]
    run(once := FakeModel(script), 0.7, temperatures=(0.1,))
    assert len(once.prompts) == 1


def test_a_silent_window_has_no_text_and_is_heard_once() -> None:
    model = FakeModel(lambda *_: (text("a"), -1.5), no_speech=0.9)
    assert run(model, 2.5) == []
    assert [window for window, _, _ in model.prompts] == [0, 1, 2]


def test_text_before_a_sound_stands_before_its_first_window() -> None:
    model = FakeModel(lambda *_: (text("a"), -0.1))
    run(model, 1.5, before=list(range(40, 100)), language="en", task="translate")
    assert [prompt for _, prompt, _ in model.prompts] == [[136, *range(53, 100), 131, 132, 135], [131, 132, 135]]


def test_windows_that_hardly_advance_are_bounded() -> None:
    model = FakeModel(lambda *_: ([STAMP, *text("a"), STAMP + 1, STAMP + 1, *text("b")], -0.1))
    run(model, 10.0)
    assert len(model.prompts) <= 4 * 12 + 10


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("srt", "1\n00:00:00,000 --> 01:02:03,500\nHi -> you\n\n2\n01:02:03,500 --> 01:02:04,000\nyes\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 01:02:03.500\nHi -> you\n\n01:02:03.500 --> 01:02:04.000\nyes\n\n"),
    ],
)
def test_subtitles_have_the_times_of_segments(kind: Any, expected: str) -> None:
    times = [(0.0, 3723.5, " Hi --> you"), (3723.5, 3724.0, " yes")]
    segments = [SpeechSegment(i, 0, a, b, text, [], 0.0, 0.0, 0.0, 0.0) for i, (a, b, text) in enumerate(times)]
    assert subtitles(segments, kind) == expected
