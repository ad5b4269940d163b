"""`GET /v1/realtime`: a WebSocket over which a client sends a sound while it is recorded, and gets what is said in it.

Each utterance, from its first samples to its commit, is one request to `/v1/audio/transcriptions` whose body arrives
piece by piece: it has the checks, the limits and the end of such a request.
"""

from __future__ import annotations

import asyncio
import os
import struct
from time import time
from typing import Any, Final, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.decode import decode
from octavo.server.errors import ApiError, ErrorBody, ErrorObject, as_api_error, shutting_down
from octavo.server.schema.realtime import (
    Append,
    Clear,
    Commit,
    Event,
    OpenAIWords,
    SessionUpdate,
    SpokenEvent,
    VllmWords,
)
from octavo.server.sending import Repeated
from octavo.server.websocket import GOING_AWAY, TOO_LARGE, Upgrade, WebSocket, WebSocketError, upgrade_required

MOST_UTTERANCES: Final = 4
"""Utterances of a session that are appended to or written down at once."""
_PATH: Final = "/realtime"
_TRANSCRIPTIONS: Final = "/audio/transcriptions"
_SUBPROTOCOL: Final = "realtime"
_PASSED_ON: Final = frozenset(
    {b"host", b"authorization", b"x-api-key", b"sec-websocket-protocol", b"traceparent", b"tracestate"}
)
"""Headers of the handshake that each utterance has, too."""
_LONGEST_ID: Final = 100
"""Characters of a request's id with which those of utterances begin."""


async def realtime(context: ServerContext, request: Request) -> ASGIApp:
    """Open a WebSocket on which sounds are written down while they come, as in the realtime APIs of vLLM and OpenAI."""
    upgrade: Upgrade | None = request.scope.get("extensions", {}).get(Upgrade.NAME)
    if upgrade is None:
        raise upgrade_required()
    if context.open_requests.is_closing:
        raise shutting_down()

    async def converse(scope: Scope, receive: Receive, send: Send) -> None:
        offered = request.headers.get("sec-websocket-protocol", "").split(",")
        subprotocol = _SUBPROTOCOL if _SUBPROTOCOL in (each.strip() for each in offered) else None
        state = scope["state"]
        socket = upgrade.accept(state["fields"], state["request_id"], subprotocol)
        state["status"] = 101
        session = _Session(context, request, socket)
        async with Repeated(socket.ping, context.open_requests.keep_alive_s):
            await session.run()

    return converse


class _Session:
    """What one client asks for, and its utterances in their order."""

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
        self._open: list[_Utterance] = []
        self._current: _Utterance | None = None
        self._num_utterances = 0
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
        await self.say(self.words.error(as_api_error(error, self.id).body.error))

    def end(self, utterance: _Utterance) -> None:
        """Forget an utterance that was answered."""
        self._open.remove(utterance)
        self._close_if_done()

    def _stop(self) -> None:
        """Write down what was committed, and nothing more."""
        self._is_stopping = True
        if self._current is not None:
            self._current.leave(shutting_down())
            self._current = None
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
                    if self.words.says_more:
                        await self.say({"type": "input_audio_buffer.cleared"})
        except (InvalidRequest, ApiError) as error:
            if isinstance(error, InvalidRequest) and (error.field, error.code) == ("type", "invalid_value"):
                error.code = "unknown_event"
            await self.refuse(error)

    async def _update(self, event: SessionUpdate) -> None:
        form = event.form()
        self._context.models.name(form.get("model"))
        if event.session is not None:
            self.words = OpenAIWords()
        self._form, self._rate = form, event.rate()
        if event.session is not None:
            await self.say(
                {"type": "session.updated", "session": {"id": self.id, **msgspec.to_builtins(event.session)}}
            )

    def _append(self, audio: bytes) -> None:
        """Add to the utterance, or begin one. What follows the error of an utterance is of that utterance."""
        if len(audio) % 2:
            raise InvalidRequest(
                f"audio has {len(audio):,} bytes, expected an even number: samples of 16 bits",
                field="audio",
                code="invalid_audio",
            )
        if self._is_stopping:
            raise shutting_down()
        if self._current is None:
            if len(self._open) >= MOST_UTTERANCES:
                message = f"{len(self._open)} utterances are being written down; wait for the text of the first"
                raise ApiError(429, message, code="too_many_utterances")
            before = self._open[-1] if self._open else None
            self._num_utterances += 1
            self._current = _Utterance(self, f"item-{self._num_utterances}", self._form, self._rate, before)
            self._open.append(self._current)
        self._current.add(audio, self._context.args.max_body_size)

    async def _commit(self, event: Commit) -> None:
        """End the utterance. One without sound, by which vLLM's clients begin, is none unless it is the last."""
        utterance, self._current = self._current, None
        if utterance is None:
            if self.words.says_more:
                raise InvalidRequest(
                    "nothing was appended since the last commit", code="input_audio_buffer_commit_empty"
                )
            if event.final and not self._open:
                await self.say(self.words.done("", "", 0, 0))
            return
        if self.words.says_more:
            await self.say({"type": "input_audio_buffer.committed", "item_id": utterance.id})
        utterance.commit()


class _Utterance:
    """A request to write down one sound, from the first piece of its body to the last event of its response.

    before: the utterance after whose answer this one's is due.
    """

    def __init__(
        self, session: _Session, name: str, form: dict[str, str], rate: int, before: _Utterance | None
    ) -> None:
        self.id = name
        self._session = session
        self._before = before
        self._boundary = os.urandom(16).hex()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._num_bytes = 0
        self._status, self._body = 0, b""
        self._has_left = False
        self._reason: ApiError | None = None
        self._put(_form_head(self._boundary, {**form, "stream": "true"}, rate))
        self.task = asyncio.create_task(self._run())

    def add(self, audio: bytes, most_bytes: int) -> None:
        """Add samples. Raises ApiError where the body becomes too large; what was added before stays."""
        tail = len(_form_tail(self._boundary))
        if self._num_bytes + len(audio) + tail > most_bytes:
            raise ApiError(
                413,
                f"an utterance has more than {most_bytes:,} bytes; commit it, or start the server with a larger "
                "--max-body-size",
                code="audio_buffer_full",
            )
        self._put(audio)

    def commit(self) -> None:
        self._put(_form_tail(self._boundary), more_body=False)

    def leave(self, reason: ApiError | None = None) -> None:
        """End the request, as if its client had closed its connection. reason: an error to send."""
        if not self._has_left:
            self._has_left, self._reason = True, reason
            self._messages.put_nowait({"type": "http.disconnect"})

    def _put(self, body: bytes, *, more_body: bool = True) -> None:
        if self._num_bytes and self.task.done():
            return  # it was refused: its error is its answer
        self._num_bytes += len(body)
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    async def _receive(self) -> Message:
        message = await self._messages.get()
        if message["type"] == "http.disconnect":
            self._messages.put_nowait(message)  # whoever asks after it gets it, too
        return message

    async def _run(self) -> None:
        request = self._session.request
        path = request.scope["path"].removesuffix(_PATH) + _TRANSCRIPTIONS
        headers = [each for each in request.scope["headers"] if each[0] in _PASSED_ON]
        headers += [
            (b"content-type", f"multipart/form-data; boundary={self._boundary}".encode()),
            (b"transfer-encoding", b"chunked"),
            (b"x-request-id", f"{self._session.id}-{self.id}".encode()),
        ]
        of_request = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope = {**request.scope, **of_request, "headers": headers, "state": {}, "extensions": {}}
        try:
            await request.app(scope, self._receive, self._send)
            if self._has_left and self._reason is not None:
                await self._fail(self._reason.body.error)
        except Exception as error:
            await self._fail(as_api_error(error, self._session.id).body.error)
        finally:
            self._session.end(self)

    async def _send(self, message: Message) -> None:
        """Send on what the response says."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            self._body += message["body"]
            if not message.get("more_body"):
                await self._fail(msgspec.json.decode(self._body, type=ErrorBody).error)
        elif message["body"].startswith(b"data: {"):  # no comment, and not the mark of the end
            await self._say(msgspec.json.decode(message["body"][len(b"data: ") :], type=SpokenEvent))

    async def _say(self, event: SpokenEvent) -> None:
        session = self._session
        if event.error is not msgspec.UNSET:
            await self._fail(event.error)
            return
        await self._wait_for_turn()
        if event.type == "transcript.text.delta":
            await session.say(session.words.delta(self.id, event.delta))
        else:
            counts = {} if event.usage is msgspec.UNSET else event.usage
            tokens = counts["input_tokens"], counts["output_tokens"]
            await session.say(session.words.done(self.id, event.text, *tokens))

    async def _fail(self, error: ErrorObject) -> None:
        await self._wait_for_turn()
        await self._session.say(self._session.words.failed(self.id, error))

    async def _wait_for_turn(self) -> None:
        """Return after the answer to the utterance before."""
        if self._before is not None:
            await asyncio.wait({self._before.task})
            self._before = None


def _form_head(boundary: str, fields: dict[str, str], rate: int) -> bytes:
    """Return a form up to the samples of its file: a wav of unknown length, as streams have them."""
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
             for name, value in fields.items()]  # fmt: skip
    parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode())
    unknown = b"\xff\xff\xff\xff"
    sound = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)  # integers, one channel, 2 bytes a sample
    return b"".join((*parts, b"RIFF", unknown, b"WAVEfmt ", sound, b"data", unknown))


def _form_tail(boundary: str) -> bytes:
    return f"\r\n--{boundary}--\r\n".encode()
