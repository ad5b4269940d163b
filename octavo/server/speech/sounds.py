"""Makes encoder features or prompts from the form of a request with a sound; runs in a helper process."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

import msgspec
from starlette.requests import Request

from octavo.core.media import MediaInput
from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.decode import read_pieces
from octavo.server.errors import ApiError
from octavo.server.keys import sender_of
from octavo.server.multipart import form_head, form_tail, is_form, read_form
from octavo.server.schema.audio import TranscriptionRequest, of_form
from octavo.server.shared_bytes import take_features
from octavo.server.speech.speech_prompts import Asked, Task, style_of

if TYPE_CHECKING:
    from octavo.config.schema import ModelConfig
    from octavo.engine.input.input_processor import InputProcessor
    from octavo.multimodal.processors.log_mel import LogMel
    from octavo.server.context import ServerContext


T = TypeVar("T", bound="HeardSound | SpokenSound")

HEAR: Final = "hear "
"""First word of the job's kind; the task and the type of the body follow."""
_TIMED_PIECE_S: Final = 30.0
"""Seconds of the longest piece if times are asked for."""


class HeardSound(msgspec.Struct, frozen=True, array_like=True):
    """A request and its sound. features: float32 [bands, frames]. num_frames: number of frames that the sound
    covers."""

    asked: TranscriptionRequest
    features: bytes
    num_frames: int
    seconds: float


class SpokenPiece(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that asks a model to transcribe a sound from `start` to `end`, in seconds. token_ids: 4 bytes each,
    in the byte order of the machine: a list would become objects of all pieces in one call."""

    token_ids: bytes
    media: tuple[MediaInput, ...]
    start: float
    end: float

    @property
    def prompt(self) -> Prompt:
        return Prompt(token_ids=array("i", self.token_ids).tolist(), media=self.media)


class SpokenSound(msgspec.Struct, frozen=True, array_like=True):
    """A request and the pieces of its sound; each piece has a prompt of its own."""

    asked: TranscriptionRequest
    pieces: list[SpokenPiece]
    seconds: float


async def read_sound(context: ServerContext, request: Request, task: Task, kind: type[T]) -> T:
    """Return a form with a sound, read by `hear` in a helper process for the model and the task. Raises InvalidRequest
    or ApiError, also if the features exceed their limit.
    """
    content_type = request.headers.get("content-type", "")
    if not is_form(content_type.encode("latin-1")):
        raise ApiError(415, "send the sound as multipart/form-data, in a field file", code="invalid_content_type")
    pieces = await read_pieces(request)
    async with context.open_requests.track(request.receive):
        heard = await context.texts.pool.run(f"{HEAR}{task} {content_type}", pieces, sender_of(request.scope))
    take_features(request.scope, len(heard))
    return await asyncio.to_thread(msgspec.msgpack.decode, heard, type=kind)


def hear(job: str, body: bytes, model: ModelConfig, tools: InputProcessor) -> bytes:
    """Return an encoded `HeardSound`, or a `SpokenSound` for a model without tokens of speech.

    job: the task and the type of the body. Raises InvalidRequest or CheckpointError.
    """
    from octavo.multimodal.sound import decoded

    task, _, content_type = job.partition(" ")
    asked, data = of_form(read_form(content_type, body))
    asked.check_task("translate" if task == "translate" else "transcribe")
    if model.speech is None:
        return msgspec.msgpack.encode(_in_prompts(asked, task, data, tools))
    settings = log_mel(model.path)
    samples = decoded(data, settings.sampling_rate, "file")
    num_frames = -(-len(samples) // settings.hop_length)
    features = settings.features(samples)
    return msgspec.msgpack.encode(
        HeardSound(asked, features.tobytes(), num_frames, round(len(samples) / settings.sampling_rate, 2))
    )


def _in_prompts(asked: TranscriptionRequest, task: Any, data: bytes, tools: InputProcessor) -> SpokenSound:
    """Return the prompts that ask for the text of a sound, which is cut as the context, the model or times require."""
    from octavo.multimodal.sound import FIELD, cut_where_quiet, decoded

    sounds, style = tools.media.hearing, style_of(tools)
    assert sounds is not None
    assert style is not None, "a model that writes no speech is refused before its form is read"
    rate = sounds.sampling_rate
    samples = decoded(data, rate, "file")
    most_s = min(sounds.piece_s, style.piece_s, _TIMED_PIECE_S if asked.is_timed else style.piece_s)
    pieces: list[SpokenPiece] = []
    start = 0
    for piece in cut_where_quiet(samples, rate, most_s):
        written, stop = style.prompt(tools, Asked(asked, task, (piece, rate))), start + len(piece)
        # the sound comes as the form's file, also for families whose template takes it in messages
        prompt = msgspec.structs.replace(written, media_places=None)
        try:
            token_ids, media = tools.media.read(prompt, tools.tokenised(prompt))
        except InvalidRequest as error:
            if error.field == FIELD:  # the name that a sound has in prompts
                error.field, error.args = "file", (str(error).replace(FIELD, "file"),)
            raise
        pieces.append(
            SpokenPiece(array("i", token_ids).tobytes(), media, round(start / rate, 2), round(stop / rate, 2))
        )
        start = stop
    return SpokenSound(asked, pieces, round(len(samples) / rate, 2))


def form_of_url(model: ModelConfig, body: bytes) -> tuple[str, bytes]:
    """Return the type and the bytes of the form that a JSON object with a `file_url` stands for.

    Raises ValueError, or InvalidRequest for a URL that the operator does not allow.
    """
    from octavo.multimodal.media_urls import MediaUrls

    fields = msgspec.json.decode(body, type=dict[str, Any])
    url = fields.pop("file_url", None)
    if not isinstance(url, str) or "file" in fields:
        raise ValueError("the body needs the sound as file_url, a URL such as data:audio/wav;base64,…, and no file")
    sound = MediaUrls(model).read(url, "file_url")
    boundary, texts = uuid4().hex, list[tuple[str, str]]()
    for name, value in fields.items():
        for each in value if isinstance(value, list) else () if value is None else (value,):
            texts.append((name, each if isinstance(each, str) else msgspec.json.encode(each).decode()))
    form = form_head(boundary, texts) + sound + form_tail(boundary)
    return f"multipart/form-data; boundary={boundary}", form


def log_mel(path: str) -> LogMel:
    """Return the settings of a model's spectrograms. Raises CheckpointError."""
    from octavo.config.checkpoint import Checkpoint
    from octavo.multimodal.processors.log_mel import LogMel

    return LogMel.of(Path(path), Checkpoint.open(Path(path)).values)
