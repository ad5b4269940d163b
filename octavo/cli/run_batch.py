"""`octavo run-batch -i IN -o OUT`: runs the requests of a file in OpenAI's batch format, without a server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final
from uuid import uuid4

import msgspec
from cyclopts import Parameter

from octavo.cli.options import Given, heading, with_options
from octavo.cli.report import check_file
from octavo.cli.start import log_quietly
from octavo.cli.terminal import say
from octavo.config.args import EngineArgs
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.server.app import App

_MOST_OPEN: Final = 512
"""Most lines that are read ahead of the first one whose result is not written yet."""
_MOST_LINE_BYTES: Final = 32 << 20
_MOST_OPEN_BYTES: Final = 256 << 20
"""Most bytes of these lines together."""
_OF_SOUNDS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
_MOST_SOUNDS: Final = 8
"""Most lines with sounds that are read and transcribed at once."""


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    stream: Any = None


class _Response(msgspec.Struct):
    status_code: int


class _Outcome(msgspec.Struct):
    """The fields of an output line that tell success from failure."""

    response: _Response | None = None


@with_options(EngineArgs)
def run_batch(
    *,
    input_file: Annotated[str, Parameter(name=["--input-file", "-i"], group=heading("Prompt"), help="JSON Lines.")],
    output_file: Annotated[
        str,
        Parameter(name=["--output-file", "-o"], group=heading("Prompt"), help="Results, in the order of the input."),
    ],
    given: Given,
) -> None:
    """Run the requests of a file in OpenAI's batch format. Started again after an interruption, it goes on."""
    args = given.arguments(EngineArgs)
    log_quietly(args)
    asyncio.run(_run(args, Path(input_file), Path(output_file)))
    num_results, num_errors = count_results(Path(output_file))
    say(f"{output_file}: results: {num_results:,}, errors among them: {num_errors:,}", sys.stderr)


async def _run(args: EngineArgs, source: Path, target: Path) -> None:
    from octavo.server.serving import app_in_process

    if not source.is_file():
        raise ConfigError(f"input_file {source} is no file; give one with a request in each line")
    check_file("output_file", str(target))
    async with app_in_process(args) as app:
        await write_results(app, source, target)


async def write_results(app: App, source: Path, target: Path) -> None:
    """Write a result for each line of `source`. Incomplete results are in a file of their own beside `target`."""
    partial = target.with_name(f"{target.name}.partial")
    num_done = _keep_complete_lines(partial)
    results: deque[tuple[int, asyncio.Task[bytes]]] = deque()
    num_open_bytes, sounds = 0, asyncio.Semaphore(_MOST_SOUNDS)
    with source.open("rb") as lines, _naming(partial), partial.open("ab") as out:
        for line in islice(_lines(lines), num_done, None):
            results.append((len(line or b""), asyncio.create_task(_result(app, line, sounds))))
            num_open_bytes += len(line or b"")
            while len(results) >= _MOST_OPEN or num_open_bytes > _MOST_OPEN_BYTES:
                num_bytes, result = results.popleft()
                out.write(await result)
                out.flush()
                num_open_bytes -= num_bytes
        for _, result in results:
            out.write(await result)
    os.replace(partial, target)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name `path` in errors of writing, as errors of opening do: without a name `main` reports standard output."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def count_results(path: Path) -> tuple[int, int]:
    """Return how many results a file of them has, and how many of these are errors."""
    num_results = num_errors = 0
    with path.open("rb") as lines:
        for line in lines:
            response = msgspec.json.decode(line, type=_Outcome).response
            num_results += 1
            num_errors += response is None or response.status_code >= 400
    return num_results, num_errors


def _keep_complete_lines(partial: Path) -> int:
    """Cut off an incomplete last line, and return the number of the others."""
    if not partial.exists():
        return 0
    num_lines = num_bytes = 0
    with partial.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                num_lines, num_bytes = num_lines + 1, num_bytes + len(line)
        file.truncate(num_bytes)
    return num_lines


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield lines that are not blank; None for one that is too long."""
    while line := file.readline(_MOST_LINE_BYTES):
        if len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(_MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield None
        elif line.strip():
            yield line


async def _result(app: App, line: bytes | None, sounds: asyncio.Semaphore) -> bytes:
    """Return the line of the output for a line of the input; a fault of the input becomes its error.

    sounds: acquired for a line with a sound.
    """
    asked, custom_id = None, None
    try:
        if line is None:
            raise ValueError(f"the line has more than {_MOST_LINE_BYTES:,} bytes; send several requests")
        asked = msgspec.json.decode(line, type=_Line)
        custom_id = asked.custom_id
        if asked.method != "POST" or not asked.url.startswith("/v1/"):
            raise ValueError(f"{asked.method} {asked.url} is no request of a batch; use POST and a path below /v1/")
        if _wants_stream(asked.body):
            raise ValueError("stream is true, but a batch has no streams; leave it out")
        if asked.url in _OF_SOUNDS:
            from octavo.server.speech.sounds import form_of_url

            async with sounds:
                form = await asyncio.to_thread(form_of_url, app.context.llm.config.model, bytes(asked.body))
                status, request_id, body = await _ask(app, asked.url, *form)
        else:
            status, request_id, body = await _ask(app, asked.url, "application/json", bytes(asked.body))
    except (ValueError, RecursionError) as error:
        problem: dict[str, Any] = {"code": "invalid_request", "message": str(error)}
        return _encoded(custom_id, None, problem)
    return _encoded(custom_id, {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}, None)


def _wants_stream(body: msgspec.Raw) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Body).stream)
    except msgspec.DecodeError:
        return False  # the application reports the fault


def _encoded(custom_id: str | None, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


async def _ask(app: App, url: str, content_type: str, content: bytes) -> tuple[int, str, bytes]:
    """Return status, id and body of the response of the application to a request."""
    messages: list[Any] = []
    body = [{"type": "http.request", "body": content, "more_body": False}]
    headers = [(b"host", b"localhost"), (b"content-type", content_type.encode())]
    headers.append((b"content-length", str(len(content)).encode()))
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": url, "root_path": ""}

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        messages.append(message)

    await app({**scope, "query_string": b"", "headers": headers}, receive, send)
    sent = dict(messages[0]["headers"])
    return messages[0]["status"], sent[b"x-request-id"].decode(), b"".join(each["body"] for each in messages[1:])
