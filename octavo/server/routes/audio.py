"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a sound."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.media import MediaInput
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.core.speech import SpeechTokens
from octavo.errors import InvalidRequest
from octavo.multimodal.transcripts import compression_ratio
from octavo.server.context import ServerContext
from octavo.server.errors import ApiError
from octavo.server.generation import EngineRequests
from octavo.server.schema.audio import TranscriptionRequest
from octavo.server.sending import DONE, EventStream, event
from octavo.server.speech.sounds import HeardSound, SpokenPiece, SpokenSound, log_mel, read_sound
from octavo.server.speech.speech_prompts import SpeechStyle, Task, gap, no_text_before, style_of
from octavo.server.speech.transcription import FALLBACKS, SpeechSegment, Transcriber
from octavo.server.usage import TokenCounts

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

_MOST_CHARS_BEFORE: Final = 1 << 14
"""Last characters of the text before a sound that are tokenised: the model reads its last few hundred tokens."""


class DurationUsage(Struct, frozen=True):
    """The usage of a request with a sound: its length in seconds."""

    seconds: float
    type: Literal["duration"] = "duration"


class Transcription(Struct, frozen=True):
    """The response in the format json."""

    text: str
    usage: DurationUsage


class VerboseTranscription(Struct, frozen=True):
    """The response in the format verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpeechSegment]
    usage: DurationUsage


async def transcribe(context: ServerContext, request: Request) -> Any:
    """Return what is said in a sound, in its language."""
    return await _respond(context, request, "transcribe")


async def translate(context: ServerContext, request: Request) -> Any:
    """Return what is said in a sound, in English."""
    return await _respond(context, request, "translate")


async def _respond(context: ServerContext, request: Request, task: Task) -> Any:
    speech = context.llm.config.model.speech
    if speech is None:
        return await _respond_by_prompts(context, request, task)
    heard = await read_sound(context, request, task, HeardSound)
    asked = heard.asked
    _check(asked, speech, task)
    talk = _Talk(context, request, asked)
    transcriber = _transcriber(context.llm, talk, heard, speech, task)
    if asked.stream:
        return EventStream(_events(talk, asked, _segment_texts(transcriber)), context.open_requests)
    async with context.open_requests.track(request.receive), aclosing(transcriber.segments()) as windows:
        segments = [each async for window in windows for each in window]
    return _formatted(asked, segments, task, transcriber.language or "en", heard.seconds)


def _formatted(
    asked: TranscriptionRequest, segments: list[SpeechSegment], task: Task, language: str, seconds: float
) -> Response | Transcription | VerboseTranscription:
    """Return segments in the format that is asked for. seconds: length of the sound."""
    text, usage = "".join(each.text for each in segments).strip(), DurationUsage(seconds)
    match asked.response_format:
        case "srt" | "vtt":
            return Response(subtitles(segments, asked.response_format), media_type="text/plain")
        case "text":
            return Response(f"{text}\n", media_type="text/plain")
        case "json":
            return Transcription(text, usage)
        case "verbose_json":
            return VerboseTranscription(task, language, seconds, text, segments, usage)


async def _respond_by_prompts(context: ServerContext, request: Request, task: Task) -> Any:
    """Respond with a model that reads sounds in prompts. Raises ApiError for a model that does not, or not for this
    task."""
    style = style_of(context.llm.input)
    if style is None or task not in style.tasks:
        others = "Whisper or Granite Speech" if task == "translate" else "Whisper or Qwen3-ASR"
        raise ApiError(
            400,
            f"this model does not {task} sounds; start the server with one that does, such as {others}",
            code="unsupported_task",
        )
    heard = await read_sound(context, request, task, SpokenSound)
    asked = heard.asked
    talk = _Talk(context, request, asked)
    params = SamplingParams(
        temperature=asked.temperature or 0.0,
        max_tokens=asked.max_completion_tokens,
        logprobs=0 if asked.response_format == "verbose_json" else None,
        output_kind=OutputKind.DELTA if asked.stream else OutputKind.FINAL_ONLY,
        **asked.sampling,
    )
    if asked.stream:
        return EventStream(_events(talk, asked, _piece_texts(talk, heard, style, params)), context.open_requests)
    segments, language, before = list[SpeechSegment](), asked.language, ""
    async with context.open_requests.track(request.receive):
        for piece in heard.pieces:
            [output] = (await talk.last(piece.prompt, talk.limited(params, style, piece))).outputs
            named, text = style.split(output.text) or (None, output.text)
            language, text = language or named, text.strip()
            if text:
                segments.append(_segment(len(segments), piece, gap(before, text) + text, output, params))
                before = text
    return _formatted(asked, segments, task, language or "", heard.seconds)


def _segment(
    number: int, piece: SpokenPiece, text: str, output: CompletionOutput, params: SamplingParams
) -> SpeechSegment:
    """Return a piece as a segment. The model gives no probability of silence."""
    return SpeechSegment(
        id=number,
        seek=round(piece.start * 100),
        start=piece.start,
        end=piece.end,
        text=text,
        tokens=output.token_ids,
        temperature=params.temperature,
        avg_logprob=(output.cumulative_logprob or 0.0) / max(1, len(output.token_ids)),
        compression_ratio=compression_ratio(text),
        no_speech_prob=0.0,
    )


def _check(asked: TranscriptionRequest, speech: SpeechTokens, task: str) -> None:
    """Raise InvalidRequest for a field that the model does not support."""
    known = speech.languages or {"en": 0}
    if asked.language is not None and asked.language.lower() not in known:
        raise InvalidRequest(
            f"language is {asked.language!r}, expected one of {', '.join(sorted(known))}", field="language"
        )
    if task == "translate" and not speech.tasks:
        raise InvalidRequest("this model knows English alone: there is nothing to translate", code="unsupported_task")
    if asked.to_language is not None and asked.to_language.lower() != "en":
        raise InvalidRequest(
            f"to_language is {asked.to_language!r}, expected en: this model translates into English alone",
            field="to_language",
        )
    for name in ("prompt", "hotwords") if speech.previous is None else ():
        if getattr(asked, name):
            raise no_text_before(name)


class _Talk:
    """The requests of one client for the windows of one sound, and their token counts."""

    def __init__(self, context: ServerContext, request: Request, asked: TranscriptionRequest) -> None:
        asked.stream_include_usage |= context.args.enable_force_include_usage
        self.requests = EngineRequests(context, request, asked, "transcr-")
        self._max_model_len = context.max_model_len
        self._counts: list[tuple[int, int]] = []
        """For each prompt: its number of tokens, and the number generated so far."""

    @property
    def counts(self) -> TokenCounts:
        """The token counts of all prompts so far."""
        num_in, num_out = sum(num for num, _ in self._counts), sum(num for _, num in self._counts)
        return TokenCounts(num_in, num_out, num_in + num_out)

    def limited(self, params: SamplingParams, style: SpeechStyle, piece: SpokenPiece) -> SamplingParams:
        """Return the parameters with `max_tokens` bounded by the length of the piece, if the context has room for
        more."""
        if style.tokens_per_s is None:
            return params
        most = 1 + int((piece.end - piece.start) * style.tokens_per_s)
        room = self._max_model_len - len(piece.prompt.token_ids or ())
        return msgspec.structs.replace(params, max_tokens=most) if most < room else params

    async def ask(self, prompt: list[int], media: MediaInput, params: SamplingParams) -> RequestOutput:
        """Return the last output of a prompt over a window. Raises ApiError."""
        return await self.last(Prompt(token_ids=prompt, media=(media,)), params)

    async def last(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Return the last output of a prompt. Raises ApiError."""
        async with aclosing(self.outputs(prompt, params)) as outputs:
            *_, last = [output async for output in outputs]
        return last

    async def outputs(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a prompt, and count its tokens behind the last one that is read. Raises ApiError."""
        place = len(self._counts)
        self._counts.append((0, 0))
        try:
            async with aclosing(self.requests.outputs([prompt], params, {})) as outputs:
                async for _, output in outputs:
                    self._counts[place] = len(output.prompt_token_ids), output.num_generated_tokens
                    yield output
        finally:
            if self.requests.meter is not None:
                self.requests.meter.spend(sum(self._counts[place]))


def _transcriber(llm: AsyncLLM, talk: _Talk, heard: HeardSound, speech: SpeechTokens, task: str) -> Transcriber:
    import numpy as np

    asked, settings = heard.asked, log_mel(llm.config.model.path)

    def written(text: str | None) -> list[int]:
        last = (text or "").strip()[-_MOST_CHARS_BEFORE:]
        found = llm.tokenizer.encode(f" {last}", add_special_tokens=False) if text else []
        return [each for each in found if each < speech.end]

    return Transcriber(
        tokens=speech,
        settings=settings,
        features=np.frombuffer(heard.features, np.float32).reshape(settings.feature_size, -1),
        num_frames=heard.num_frames,
        ask=talk.ask,
        decode=llm.tokenizer.decode,
        max_model_len=llm.ready.max_model_len,
        task=task,
        language=None if asked.language is None else asked.language.lower(),
        timestamps=asked.is_timed or heard.num_frames > settings.num_frames,
        temperatures=(asked.temperature,) if asked.temperature else FALLBACKS,
        before=written(asked.prompt),
        hotwords=written(asked.hotwords),
        sampling=asked.sampling,
        max_tokens=asked.max_completion_tokens,
    )


async def _segment_texts(transcriber: Transcriber) -> AsyncGenerator[str, None]:
    async with aclosing(transcriber.segments()) as windows:
        async for window in windows:
            for segment in window:
                yield segment.text


async def _piece_texts(
    talk: _Talk, heard: SpokenSound, style: SpeechStyle, params: SamplingParams
) -> AsyncGenerator[str, None]:
    """Yield the text of each piece as it is written, without the language before it."""
    last = ""
    for piece in heard.pieces:
        written, num_sent = "", 0
        outputs = talk.outputs(piece.prompt, talk.limited(params, style, piece))
        async with aclosing(outputs):
            async for output in outputs:
                [part] = output.outputs
                written += part.text
                found = style.split(written) or ((None, written) if output.finished else None)
                text = found[1].strip()[num_sent:] if found else ""
                if text:
                    yield text if num_sent else gap(last, text) + text
                    num_sent, last = num_sent + len(text), text


async def _events(
    talk: _Talk, asked: TranscriptionRequest, pieces: AsyncGenerator[str, None]
) -> AsyncGenerator[bytes, None]:
    """Yield an event for each piece of text, one with the whole text, and one with all tokens if that is asked for.

    `choices` repeats `delta` for clients of vLLM, and adds the finish reason.
    """
    encoder, texts = msgspec.json.Encoder(), list[str]()
    counts_all = asked.stream_include_usage and asked.stream_continuous_usage_stats
    async with aclosing(pieces):
        async for piece in pieces:
            if text := piece if texts else piece.lstrip():
                texts.append(text)
                so_far = {"usage": talk.counts} if counts_all else {}
                yield event(
                    encoder, {"type": "transcript.text.delta", "delta": text, "choices": _choices(text), **so_far}
                )
    counts, whole = talk.counts, "".join(texts).strip()
    tokens = {"input_tokens": counts.prompt_tokens, "output_tokens": counts.completion_tokens}
    usage = {"type": "tokens", **tokens, "total_tokens": counts.total_tokens}
    done = {"type": "transcript.text.done", "text": whole, "choices": _choices("", "stop"), "usage": usage}
    yield event(encoder, done)
    if asked.stream_include_usage:
        yield event(encoder, {"choices": [], "usage": counts})
    yield DONE


def _choices(text: str, finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]


def subtitles(segments: Iterable[SpeechSegment], kind: Literal["srt", "vtt"]) -> str:
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
