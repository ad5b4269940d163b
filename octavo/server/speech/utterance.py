"""Transcribes a sound while it arrives: its requests and their answers.

Each utterance is a request to `/v1/audio/transcriptions` whose body arrives piece by piece, with all checks and limits
of that endpoint.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import Message

from octavo.server.errors import ApiError, ErrorBody, ErrorObject, as_api_error
from octavo.server.multipart import form_head, form_tail
from octavo.server.schema.realtime import OpenAIWords, SpokenEvent, VllmWords
from octavo.server.speech.speech_prompts import gap

_PATH: Final = "/realtime"
_TRANSCRIPTIONS: Final = "/audio/transcriptions"
_PASSED_ON: Final = frozenset(
    {b"host", b"authorization", b"x-api-key", b"sec-websocket-protocol", b"traceparent", b"tracestate"}
)
"""Headers of the handshake that are passed on to the request of each utterance."""


class Turn:
    """The answer to the sound that a client appends until it commits: one utterance, or several that were cut in
    pauses.

    say: sends an event to the client.
    """

    def __init__(
        self, item_id: str, words: VllmWords | OpenAIWords, say: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        self.id = item_id
        self.has_failed = False
        """Whether an error was sent."""
        self.num_open = self._num_utterances = 0
        """The number of utterances without an answer yet, and of all utterances."""
        self._is_committed = False
        self._words, self._say = words, say
        self._text = ""
        self._num_in = self._num_out = 0

    async def add(self, text: str, *, is_first: bool) -> None:
        """Send more text. is_first: whether it is the first of an utterance."""
        if not self.has_failed:
            if is_first and not self._text[-1:].isspace():
                text = gap(self._text, text) + text
            self._text += text
            await self._say(self._words.delta(self.id, text))

    def begin(self) -> str:
        """Count one more utterance and return a name for it."""
        self.num_open += 1
        self._num_utterances += 1
        return self.id if self._num_utterances == 1 else f"{self.id}.{self._num_utterances}"

    def count(self, num_in: int, num_out: int) -> None:
        """Count the tokens of an utterance."""
        self._num_in += num_in
        self._num_out += num_out

    async def end(self) -> None:
        """Count an utterance as answered."""
        self.num_open -= 1
        await self._end_if_done()

    async def commit(self) -> None:
        """Note that no utterance follows: once all are answered, the whole text is sent."""
        self._is_committed = True
        await self._end_if_done()

    async def _end_if_done(self) -> None:
        if self._is_committed and not self.num_open and not self.has_failed:
            await self._say(self._words.done(self.id, self._text.strip(), self._num_in, self._num_out))

    async def fail(self, error: ErrorObject) -> None:
        if not self.has_failed:
            self.has_failed = True
            await self._say(self._words.failed(self.id, error))


class Utterance:
    """A request to write down one sound, from the first piece of its body to the last event of its response.

    session_id: prefix of the request's id. before: the utterance whose answer must be sent before this one's.
    ended: called once it is answered.
    """

    def __init__(
        self,
        request: Request,
        session_id: str,
        turn: Turn,
        form: dict[str, str],
        rate: int,
        before: Utterance | None,
        ended: Callable[[Utterance], None],
    ) -> None:
        self.turn = turn
        self._request, self._id, self._ended = request, f"{session_id}-{turn.begin()}", ended
        self._before = before
        self._has_text = False
        self._boundary = os.urandom(16).hex()
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._num_bytes = 0
        self.is_whole = False
        """Whether the sound has ended: it was committed, or nothing was added for a long time."""
        self._status, self._body = 0, b""
        self._has_left = False
        self._reason: ApiError | None = None
        self._put(form_head(self._boundary, {**form, "stream": "true"}.items()) + _wav_head(rate))
        self.task = asyncio.create_task(self._run())

    def add(self, audio: bytes, most_bytes: int) -> None:
        """Add samples. Raises ApiError if the body becomes too large; earlier samples stay."""
        tail = len(form_tail(self._boundary))
        if self._num_bytes + len(audio) + tail > most_bytes:
            raise ApiError(
                413,
                f"an utterance has more than {most_bytes:,} bytes; commit it, or start the server with a larger "
                "--max-body-size",
                code="audio_buffer_full",
            )
        self._put(audio)

    def commit(self) -> None:
        """End the sound."""
        if not self.is_whole:
            self.is_whole = True
            self._put(form_tail(self._boundary), more_body=False)

    def leave(self, reason: ApiError | None = None) -> None:
        """End the request, as if its client had closed its connection. reason: an error to send."""
        if not self._has_left:
            self._has_left, self._reason = True, reason
            self._messages.put_nowait({"type": "http.disconnect"})

    def _put(self, body: bytes, *, more_body: bool = True) -> None:
        if self._num_bytes and self.task.done():
            return  # it was refused: the error is its answer
        self._num_bytes += len(body)
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    async def _receive(self) -> Message:
        try:
            async with asyncio.timeout(None if self.is_whole else self._request.app.context.args.body_timeout_s):
                message = await self._messages.get()
        except TimeoutError:  # the client has been silent for long: untranscribed sound takes memory
            self.commit()
            message = await self._messages.get()
        if message["type"] == "http.disconnect":
            self._messages.put_nowait(message)  # whoever asks after it gets it, too
        return message

    async def _run(self) -> None:
        request = self._request
        path = request.scope["path"].removesuffix(_PATH) + _TRANSCRIPTIONS
        headers = [each for each in request.scope["headers"] if each[0] in _PASSED_ON]
        headers += [
            (b"content-type", f"multipart/form-data; boundary={self._boundary}".encode()),
            (b"transfer-encoding", b"chunked"),
            (b"x-request-id", self._id.encode()),
        ]
        of_request = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope = {**request.scope, **of_request, "headers": headers, "state": {}, "extensions": {}}
        try:
            await request.app(scope, self._receive, self._send)
            if self._has_left and self._reason is not None:
                await self._fail(self._reason.body.error)
        except Exception as error:
            await self._fail(as_api_error(error, self._id).body.error)
        finally:
            await self.turn.end()
            self._ended(self)

    async def _send(self, message: Message) -> None:
        """Forward the text and the errors of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            self._body += message["body"]
            if not message.get("more_body"):
                await self._fail(msgspec.json.decode(self._body, type=ErrorBody).error)
        elif message["body"].startswith(b"data: {"):  # no comment, and not the mark of the end
            await self._say(msgspec.json.decode(message["body"][len(b"data: ") :], type=SpokenEvent))

    async def _say(self, event: SpokenEvent) -> None:
        if event.error is not msgspec.UNSET:
            await self._fail(event.error)
            return
        await self._wait_for_turn()
        if event.type == "transcript.text.delta":
            await self.turn.add(event.delta, is_first=not self._has_text)
            self._has_text = True
            return
        counts = {} if event.usage is msgspec.UNSET else event.usage
        self.turn.count(counts["input_tokens"], counts["output_tokens"])

    async def _fail(self, error: ErrorObject) -> None:
        await self._wait_for_turn()
        await self.turn.fail(error)

    async def _wait_for_turn(self) -> None:
        """Wait until the previous utterance is answered."""
        if self._before is not None:
            await asyncio.wait({self._before.task})
            self._before = None


def _wav_head(rate: int) -> bytes:
    """Return the header of a wav file of unknown length, as streams use it."""
    unknown = b"\xff\xff\xff\xff"
    sound = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)  # integers, one channel, 2 bytes a sample
    return b"".join((b"RIFF", unknown, b"WAVEfmt ", sound, b"data", unknown))
