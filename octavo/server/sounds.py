"""From the form of a request with a sound to the spectrogram that windows are cut from; runs in a helper process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.requests import Request

from octavo.server.decode import read_pieces
from octavo.server.errors import ApiError
from octavo.server.keys import sender_of
from octavo.server.multipart import is_form, read_form
from octavo.server.schema.audio import TranscriptionRequest, of_form

if TYPE_CHECKING:
    from octavo.multimodal.log_mel import LogMel
    from octavo.server.context import ServerContext


HEAR: Final = "hear "
"""The kind of the job, before the type of the body."""


class HeardSound(msgspec.Struct, frozen=True, array_like=True):
    """A request and its sound. features: float32 [bands, frames]. num_frames: those that the sound lasts."""

    asked: TranscriptionRequest
    features: bytes
    num_frames: int
    seconds: float


async def read_sound(context: ServerContext, request: Request) -> HeardSound:
    """Return a form with a sound. It is decoded and measured in a helper process, or where there is none in a thread.

    Raises InvalidRequest or ApiError.
    """
    content_type = request.headers.get("content-type", "")
    if not is_form(content_type.encode("latin-1")):
        raise ApiError(415, "send the sound as multipart/form-data, in a field file", code="invalid_content_type")
    pieces, pool = await read_pieces(request), context.texts.pool
    async with context.open_requests.track(request.receive):
        if pool is None:
            heard = await asyncio.to_thread(hear, content_type, b"".join(pieces), context.llm.config.model.path)
        else:
            heard = await pool.run(f"{HEAR}{content_type}", pieces, sender_of(request.scope))
    return await asyncio.to_thread(msgspec.msgpack.decode, heard, type=HeardSound)


def hear(content_type: str, body: bytes, path: str) -> bytes:
    """Return an encoded `HeardSound` for the model in the directory `path`. Raises InvalidRequest, CheckpointError."""
    from octavo.multimodal.sound import decoded

    settings = log_mel(path)
    asked, data = of_form(read_form(content_type, body))
    samples = decoded(data, settings.sampling_rate, "file")
    num_frames = -(-len(samples) // settings.hop_length)
    features = settings.features(samples)
    return msgspec.msgpack.encode(
        HeardSound(asked, features.tobytes(), num_frames, round(len(samples) / settings.sampling_rate, 2))
    )


def log_mel(path: str) -> LogMel:
    """Return the settings of a model's spectrograms. Raises CheckpointError."""
    from octavo.config.checkpoint import Checkpoint
    from octavo.multimodal.log_mel import LogMel

    return LogMel.of(Path(path), Checkpoint.open(Path(path)).values)
