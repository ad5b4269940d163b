"""`GET /v1/realtime`: a WebSocket over which a client sends a sound while it is recorded, and gets what is said in it.

What a client appends until it commits is a turn, which is written down as one utterance. A client that commits before
it appends speaks on until its final commit, as those of vLLM do: its turn is cut in pauses, so that text comes while it
speaks.
"""

from __future__ import annotations

import asyncio
import os
from time import time
from typing import Any, Final, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import InvalidRequest
from octavo.multimodal.pauses import Pauses
from octavo.server.context import ServerContext
from octavo.server.decode import decode
from octavo.server.errors import ApiError, as_api_error, shutting_down
from octavo.server.http.websocket import (
    GOING_AWAY,
    TOO_LARGE,
    Upgrade,
    WebSocket,
    WebSocketError,
    not_by_this_server,
    upgrade_required,
)
from octavo.server.schema.realtime import (
    Append,
    Clear,
    Commit,
    Event,
    OpenAIWords,
    SessionUpdate,
    VllmWords,
)
from octavo.server.sending import Repeated
from octavo.server.speech.utterance import Turn, Utterance

MOST_UTTERANCES: Final = 4
"""Most utterances of a session that are recorded or written down at once."""
_SUBPROTOCOL: Final = "realtime"
_LONGEST_ID: Final = 100
"""First characters of the session's request id that the ids of its utterances begin with."""


async def realtime(context: ServerContext, request: Request) -> ASGIApp:
    """Open a WebSocket on which sounds are written down while they come, as in the realtime APIs of vLLM and OpenAI."""
    upgrade: Upgrade | None = request.scope.get("extensions", {}).get(Upgrade.NAME)
    if upgrade is None:
        asked = request.headers.get("upgrade", "").lower() == "websocket"
        raise not_by_this_server() if asked else upgrade_required()
    if context.open_requests.is_closing:
        raise shutting_down()
    await upgrade.load()

    async def converse(scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        socket = upgrade.accept(state["request_id"], _SUBPROTOCOL)
        state["status"] = 101
        session = _Session(context, request, socket)
        with context.llm.metrics.open_websocket():
            async with Repeated(socket.ping, context.open_requests.keep_alive_s):
                await session.run()

    return converse


class _Session:
    """The settings of one client, and its utterances in order."""

    def __init__(self, context: ServerContext, request: Request, socket: WebSocket) -> None:
        self.request = request
        self.id = f"sess-{request.scope['state']['request_id'][:_LONGEST_ID]}"
        self.words: VllmWords | OpenAIWords = VllmWords()
        if request.query_params.get("intent") == "transcription":
            self.words = OpenAIWords()
        self._context = context
        self._socket = socket
        self._form: dict[str, str] = {}
        self._rate = self.words.rate
        self._open: list[Utterance] = []
        self._current: Utterance | None = None
        self._turn: Turn | None = None
        self._num_turns = 0
        self._is_live = False
        """Whether the client speaks on until its final commit."""
        self._pauses = Pauses(self._rate)
        self._is_stopping = False

    async def run(self) -> None:
        """Answer events until the WebSocket is closed; what is under way then ends."""
        socket = self._socket
        socket.on_finish = self._stop
        try:
            await self.say(self.words.created(self.id, int(time())))
            while (message := await socket.receive()) is not None:
                await self._take(message)
        except WebSocketError as error:
            code = "message_too_large" if error.code == TOO_LARGE else "invalid_websocket"
            await self.refuse(ApiError(400, str(error), code=code))
            socket.close(error.code, str(error))
        finally:
            for each in self._open:
                each.leave()
            await asyncio.gather(*(each.task for each in self._open))

    async def say(self, event: dict[str, Any]) -> None:
        await self._socket.send(msgspec.json.encode({"event_id": f"event-{os.urandom(8).hex()}", **event}))

    async def refuse(self, error: Exception) -> None:
        told = as_api_error(error, self.id).body.error
        # settings that begin a session of OpenAI's API, if they are refused, too
        words = OpenAIWords() if (told.param or "").startswith("session.") else self.words
        await self.say(words.error(told))

    def _end(self, utterance: Utterance) -> None:
        """Forget an utterance that was answered."""
        self._open.remove(utterance)
        self._close_if_done()

    def _stop(self) -> None:
        """Write down what was committed, and nothing more."""
        self._is_stopping = True
        if self._current is not None and not self._current.is_whole:
            self._current.leave(shutting_down())
        self._current = self._turn = None
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_stopping and not self._open:
            self._socket.close(GOING_AWAY, "the server is shutting down")

    async def _take(self, message: bytes) -> None:
        try:
            event: Event = decode(message, cast("type[Any]", Event))
            match event:
                case SessionUpdate():
                    await self._update(event)
                case Append():
                    self._append(event.audio)
                case Commit():
                    await self._commit(event)
                case Clear():
                    if self._current is not None:
                        self._current.leave()
                        self._current = None
                        self._turn = self._turn if self._is_live else None
                        self._pauses = Pauses(self._rate)
                    if self.words.says_more:
                        await self.say({"type": "input_audio_buffer.cleared"})
        except (InvalidRequest, ApiError) as error:
            if isinstance(error, InvalidRequest) and (error.field, error.code) == ("type", "invalid_value"):
                error.code = "unknown_event"
            await self.refuse(error)

    async def _update(self, event: SessionUpdate) -> None:
        form = event.form()
        try:
            self._context.models.name(form.get("model"))
        except ApiError as error:
            error.param = event.model_field
            raise
        if event.session is not None:
            self.words, self._is_live = OpenAIWords(), False
        self._form, self._rate = form, event.rate()
        if event.session is not None:
            await self.say(
                {"type": "session.updated", "session": {"id": self.id, **msgspec.to_builtins(event.session)}}
            )

    def _append(self, audio: bytes) -> None:
        """Add to an utterance, which ends in a pause where the client speaks on until its last commit. What follows an
        error is of the turn that it ended."""
        if len(audio) % 2:
            raise InvalidRequest(
                f"audio has {len(audio):,} bytes, expected an even number: samples of 16 bits",
                field="audio",
                code="invalid_audio",
            )
        if self._is_stopping:
            raise shutting_down()
        if not self._is_live:
            self._add(audio)
            return
        size = self._pauses.part_bytes
        for start in range(0, len(audio), size):
            self._add(part := audio[start : start + size])
            # if the model is slower than the client, sound that waits goes on as one utterance
            if self._pauses.add(part) and len(self._open) < MOST_UTTERANCES and self._current is not None:
                self._current.commit()
                self._current = None

    def _add(self, audio: bytes) -> None:
        if self._turn is None:
            self._num_turns += 1
            self._turn = Turn(f"item-{self._num_turns}", self.words, self.say)
        if self._turn.has_failed:
            return
        if self._current is None or self._current.is_whole:
            if len(self._open) >= MOST_UTTERANCES:
                message = f"{len(self._open)} utterances are being written down; wait for the text of the first"
                raise ApiError(429, message, code="too_many_utterances")
            before = self._open[-1] if self._open else None
            self._current = Utterance(self.request, self.id, self._turn, self._form, self._rate, before, self._end)
            self._open.append(self._current)
        self._current.add(audio, self._context.args.max_body_size)

    async def _commit(self, event: Commit) -> None:
        """End the turn. A commit without sound begins the turn of a client that speaks on until its final commit."""
        utterance, turn = self._current, self._turn
        self._current, self._turn, self._pauses = None, None, Pauses(self._rate)
        if turn is None:
            if self.words.says_more:
                message = "nothing was appended since the last commit"
                raise InvalidRequest(message, code="input_audio_buffer_commit_empty")
            self._is_live = not event.final
            if event.final and not self._open:
                await self.say(self.words.done("", "", 0, 0))
            return
        self._is_live = self._is_live and not event.final
        if self.words.says_more:
            await self.say({"type": "input_audio_buffer.committed", "item_id": turn.id})
        if utterance is not None:
            utterance.commit()
        await turn.commit()
