"""From the form of a request with a sound to what encoders read of it; runs in a helper process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.requests import Request

from octavo.core.media import MediaInput
from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.decode import read_pieces
from octavo.server.errors import ApiError
from octavo.server.keys import sender_of
from octavo.server.multipart import is_form, read_form
from octavo.server.schema.audio import TranscriptionRequest, of_form

if TYPE_CHECKING:
    from octavo.config.schema import ModelConfig
    from octavo.engine.input_processor import InputProcessor
    from octavo.multimodal.log_mel import LogMel
    from octavo.server.context import ServerContext


T = TypeVar("T", bound="HeardSound | SoundInPrompt")

_MARKS: Final = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")
"""Special tokens of the prompt; the language stands before the last one."""
HEAR: Final = "hear "
"""The kind of the job, before the type of the body."""


class HeardSound(msgspec.Struct, frozen=True, array_like=True):
    """A request and its sound. features: float32 [bands, frames]. num_frames: those that the sound lasts."""

    asked: TranscriptionRequest
    features: bytes
    num_frames: int
    seconds: float


class SoundInPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A request and its sound in a prompt that asks a model to write it down."""

    asked: TranscriptionRequest
    token_ids: list[int]
    media: tuple[MediaInput, ...]
    seconds: float


async def read_sound(context: ServerContext, request: Request, kind: type[T]) -> T:
    """Return a form with a sound, as `hear` encodes it for the model. It is decoded and measured in a helper process,
    or where there is none in a thread.

    Raises InvalidRequest or ApiError.
    """
    content_type = request.headers.get("content-type", "")
    if not is_form(content_type.encode("latin-1")):
        raise ApiError(415, "send the sound as multipart/form-data, in a field file", code="invalid_content_type")
    pieces, pool = await read_pieces(request), context.texts.pool
    async with context.open_requests.track(request.receive):
        if pool is None:
            heard = await asyncio.to_thread(
                hear, content_type, b"".join(pieces), context.llm.config.model, context.llm.input
            )
        else:
            heard = await pool.run(f"{HEAR}{content_type}", pieces, sender_of(request.scope))
    return await asyncio.to_thread(msgspec.msgpack.decode, heard, type=kind)


def hear(content_type: str, body: bytes, model: ModelConfig, tools: InputProcessor) -> bytes:
    """Return an encoded `HeardSound`, or a `SoundInPrompt` for a model without tokens of speech.

    Raises InvalidRequest or CheckpointError.
    """
    from octavo.multimodal.sound import decoded

    asked, data = of_form(read_form(content_type, body))
    if model.speech is None:
        return msgspec.msgpack.encode(_in_prompt(asked, data, tools))
    settings = log_mel(model.path)
    samples = decoded(data, settings.sampling_rate, "file")
    num_frames = -(-len(samples) // settings.hop_length)
    features = settings.features(samples)
    return msgspec.msgpack.encode(
        HeardSound(asked, features.tobytes(), num_frames, round(len(samples) / settings.sampling_rate, 2))
    )


def writes_speech(tools: InputProcessor) -> bool:
    """Return whether a model writes down a sound that stands in the place of tokens, as Voxtral does."""
    return tools.media.sounds is not None and None not in map(tools.tokenizer.token_id, _MARKS)


def _in_prompt(asked: TranscriptionRequest, data: bytes, tools: InputProcessor) -> SoundInPrompt:
    """Return a sound in the prompt that asks for its text in its language, or in one that the request names."""
    from octavo.multimodal.sound import decoded

    if asked.response_format not in ("json", "text"):
        raise InvalidRequest(
            f"response_format is {asked.response_format}, expected json or text: this model writes no times",
            field="response_format",
        )
    if asked.prompt:
        raise InvalidRequest("prompt is set, and this model reads no text before a sound; leave it out", field="prompt")
    language = None if asked.language is None else asked.language.lower()
    if language is not None and not (len(language) == 2 and language.isascii() and language.isalpha()):
        raise InvalidRequest(f"language is {language!r}, expected a code of two letters such as en", field="language")
    sounds = tools.media.sounds
    assert sounds is not None, "a model without sounds is refused before its form is read"
    rate = sounds.sampling_rate
    samples = decoded(data, rate, "file", sounds.most_s)
    *before, mark = (tools.tokenizer.token_id(each) or 0 for each in _MARKS)
    stated = tools.tokenizer.encode(f"lang:{language}", add_special_tokens=False) if language else []
    prompt = Prompt(token_ids=[*before, *stated, mark], multi_modal_data={"audio": (samples, rate)})
    token_ids, media = tools.media.read(prompt, [*before, *stated, mark])
    return SoundInPrompt(asked, token_ids, media, round(len(samples) / rate, 2))


def log_mel(path: str) -> LogMel:
    """Return the settings of a model's spectrograms. Raises CheckpointError."""
    from octavo.config.checkpoint import Checkpoint
    from octavo.multimodal.log_mel import LogMel

    return LogMel.of(Path(path), Checkpoint.open(Path(path)).values)
