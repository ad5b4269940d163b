"""Transcribes a sound of any length, window by window, as OpenAI's `transcribe` does.

Each window is encoded once: the requests for it (is anything said, in which language, what) find its encoding. A text
that is unlikely or repeats itself is sampled again at higher temperatures.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Struct

from octavo.core.media import MediaInput
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.core.speech import SpeechTokens
from octavo.multimodal.transcripts import compression_ratio, cut_pieces

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.multimodal.processors.log_mel import LogMel

Ask = Callable[[list[int], MediaInput, SamplingParams], Awaitable[RequestOutput]]
"""Runs a prompt of token ids over a window."""

FALLBACKS: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried one after the other where a request names none."""
MOST_COMPRESSED: Final = 2.4
LEAST_LOGPROB: Final = -1.0
SILENT_FROM: Final = 0.6
"""Probability of silence from which on an unlikely text is dropped."""
_MOST_REHEARD: Final = 4
"""Most windows per window length of the sound; beyond it, each window begins at the end of the previous one."""


class _Attempt(NamedTuple):
    token_ids: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float


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


@dataclass
class Transcriber:
    """One sound and what is asked of it. features: [bands, frames], of which the sound covers `num_frames`.

    before: tokens of the text before the sound. hotwords: tokens of words to expect, which stand before each window.
    sampling: further sampling parameters.
    """

    tokens: SpeechTokens
    settings: LogMel
    features: NDArray[np.float32]
    num_frames: int
    ask: Ask
    decode: Callable[[Sequence[int]], str]
    max_model_len: int
    task: str
    language: str | None = None
    timestamps: bool = False
    temperatures: tuple[float, ...] = FALLBACKS
    before: Sequence[int] = ()
    hotwords: Sequence[int] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    async def segments(self) -> AsyncGenerator[list[SpeechSegment], None]:
        """Yield the segments of each window; mostly several, and none of a silent one."""
        size, seek, number, num_windows = self.settings.num_frames, 0, 0, 0
        most = _MOST_REHEARD * (2 + self.num_frames // size)
        while seek < self.num_frames:
            num_windows += 1
            length = min(size, self.num_frames - seek)
            media = self.settings.window(self.features, seek)
            silence = await self._no_speech(media)
            if self.language is None and self.tokens.languages:
                self.language = await self._detected(media)
            attempt = await self._written(media, silence, (*self.hotwords, *(self.before if seek == 0 else ())))
            step = length
            if silence <= SILENT_FROM or attempt.avg_logprob >= LEAST_LOGPROB:
                made, step = self._segments(attempt, silence, seek, length, number)
                number += len(made)
                yield made
            seek += step if step > 0 and num_windows < most else length

    def _segments(
        self, attempt: _Attempt, silence: float, seek: int, length: int, number: int
    ) -> tuple[list[SpeechSegment], int]:
        """Return the segments of a window that have text, and the number of frames to the begin of the next window."""
        rate = self.settings.sampling_rate / self.settings.hop_length  # frames per second
        pieces, seconds = cut_pieces(attempt.token_ids, self.tokens, length / rate)
        made: list[SpeechSegment] = []
        for piece in pieces:
            text = self.decode(piece.token_ids)
            if text.strip():
                made.append(
                    SpeechSegment(
                        id=number + len(made),
                        seek=seek,
                        start=round(seek / rate + piece.start, 2),
                        end=round(seek / rate + piece.end, 2),
                        text=text,
                        tokens=piece.token_ids,
                        temperature=attempt.temperature,
                        avg_logprob=attempt.avg_logprob,
                        compression_ratio=attempt.compression_ratio,
                        no_speech_prob=silence,
                    )
                )
        return made, round(seconds * rate)

    async def _written(self, media: MediaInput, silence: float, before: Sequence[int]) -> _Attempt:
        prompt = self.tokens.prompt(self.language, self.task, timestamps=self.timestamps)
        if before and self.tokens.previous is not None:
            prompt = [self.tokens.previous, *before[-(self.max_model_len // 2 - 1) :], *prompt]
        for temperature in self.temperatures:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=min(
                    self.max_model_len // 2, self.max_model_len - len(prompt), self.max_tokens or self.max_model_len
                ),
                logprobs=0,
                output_kind=OutputKind.FINAL_ONLY,
                **self.sampling,
            )
            [output] = (await self.ask(prompt, media, params)).outputs
            text = self.decode([each for each in output.token_ids if each < self.tokens.end]).strip()
            logprob = (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
            attempt = _Attempt(output.token_ids, temperature, logprob, compression_ratio(text) if text else 0.0)
            is_likely_or_silent = logprob >= LEAST_LOGPROB or silence > SILENT_FROM
            if is_likely_or_silent and attempt.compression_ratio <= MOST_COMPRESSED:
                break
        return attempt

    async def _no_speech(self, media: MediaInput) -> float:
        prompt = [self.tokens.start, self.tokens.no_speech]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, output_kind=OutputKind.FINAL_ONLY)
        found = (await self.ask(prompt, media, params)).prompt_logprobs or []
        described = found[1] if len(found) > 1 else None
        return math.exp(described[self.tokens.no_speech].logprob) if described else 0.0

    async def _detected(self, media: MediaInput) -> str:
        codes = {token: code for code, token in self.tokens.languages.items()}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=tuple(codes), output_kind=OutputKind.FINAL_ONLY
        )
        [output] = (await self.ask([self.tokens.start], media, params)).outputs
        return codes[output.token_ids[0]]
