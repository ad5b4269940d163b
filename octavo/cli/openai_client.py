"""A client of OpenAI-compatible servers, for `octavo chat --url`, `octavo top` and `octavo bench serve`."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from os.path import expanduser
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError, InvalidRequest, RequestFailed, ServerUnreachable

_MAX_BODY: Final = 64 << 20
_MAX_EVENT: Final = 16 << 20
_PIECE: Final = 1 << 16


def read_api_key(api_key_file: str | None) -> str | None:
    """Return the first line of the file that an option names. Raises ConfigError."""
    if api_key_file is None:
        return None
    try:
        lines = Path(expanduser(api_key_file)).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file is {api_key_file!r}, which cannot be read: {error}") from error
    if not lines or not lines[0].strip().isascii() or not lines[0].strip().isprintable():
        raise ConfigError(f"api_key_file is {api_key_file!r}, whose first line is no key")
    return lines[0].strip()


class OpenAIClient:
    """Sends requests to one server, each over a connection of its own. Raises ConfigError for a wrong address.

    url: with or without a path, with or without /v1 at its end. headers: further ones of each request.
    """

    def __init__(self, url: str, api_key: str | None = None, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ConfigError(f"url is {url!r}, expected an address such as http://127.0.0.1:8000")
        self.is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if self.is_tls else 80)
        self.address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        named = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "Connection": "close"}
        named |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        named |= headers or {}
        if any(character in text for pair in named.items() for text in pair for character in "\r\n\0"):
            raise ConfigError("a header has a line break, must be one line")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in named.items())

    async def get(self, path: str, timeout_s: float = 10.0) -> bytes:
        """Return the body of a response. Raises ServerUnreachable, InvalidRequest or RequestFailed."""
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                async for piece in self._pieces("GET", path, None):
                    body += piece
                    if len(body) > _MAX_BODY:
                        raise RequestFailed(f"{self.address}{path} sends more than {_MAX_BODY >> 20} MiB")
        except TimeoutError as error:
            raise ServerUnreachable(f"{self.address} has not responded within {timeout_s:g} s") from error
        return bytes(body)

    async def models(self) -> list[str]:
        """Return the names of the models that the server has. Raises like `get`."""
        body = await self.get("/v1/models")  # a refusal is a ValueError, too
        try:
            listed = msgspec.json.decode(body)
            return [str(each["id"]) for each in listed["data"]]
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise RequestFailed(f"{self.address}/v1/models is no list of models: is this an OpenAI server?") from error

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the decoded data of each server-sent event until [DONE]. Raises like `get`; RequestFailed also for an
        event that is an error."""
        rest = b""
        async with aclosing(self._pieces("POST", path, msgspec.json.encode(body))) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_EVENT:
                    raise RequestFailed(f"{self.address}{path} sends an event of more than {_MAX_EVENT >> 20} MiB")
                for line in lines:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield self._event(data)
        raise ServerUnreachable(f"{self.address} closed the connection before the end of the response")

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = msgspec.json.decode(data)
        except (ValueError, RecursionError) as error:
            raise RequestFailed(f"{self.address} sends an event that is no JSON") from error
        if not isinstance(event, dict) or event.get("error"):
            raise RequestFailed(_error_message(data))
        return event

    async def _pieces(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes]:
        """Yield the pieces of a response's body as they arrive."""
        response = _Response()
        parser = httptools.HttpResponseParser(response)
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self.is_tls or None)
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body is not None else ""
            writer.write(
                f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode() + (body or b"")
            )
            while not response.is_complete:
                data = await reader.read(_PIECE)
                if not data:
                    break
                parser.feed_data(data)
                if parser.get_status_code() < 400:
                    for piece in response.take():
                        yield piece
                elif sum(map(len, response.body)) > _PIECE:
                    break
        except (OSError, httptools.HttpParserError) as error:
            raise ServerUnreachable(f"{self.address} cannot be reached: {_reason(error)}") from error
        finally:
            if writer is not None:
                writer.close()
        if not response.has_head:
            raise ServerUnreachable(f"{self.address} closed the connection without a response")
        if (status := parser.get_status_code()) >= 400:
            message = f"{self.address} responds with {status}: {_error_message(b''.join(response.body))}"
            if status == 401:
                message += "; --api-key-file names a file with the key"
            raise InvalidRequest(message) if status < 500 else RequestFailed(message)


class _Response:
    """Receives the parts of a response from the parser."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.has_head = self.is_complete = False

    def take(self) -> list[bytes]:
        """Return the pieces that have arrived since the last call."""
        body, self.body = self.body, []
        return body

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


def _reason(error: Exception) -> str:
    """Return why a server cannot be reached. asyncio names the address of each try instead of what went wrong."""
    if "Connect call failed" not in str(error):
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    numbers = re.findall(r"\[Errno (\d+)\]", str(error))
    return ", ".join(dict.fromkeys(os.strerror(int(number)) for number in numbers))


def _error_message(body: bytes) -> str:
    """Return the message of an error of the OpenAI API, or the begin of another body."""
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        return str(message or found)[:1000]
    except (ValueError, RecursionError, AttributeError):
        return " ".join(body[:200].decode(errors="replace").split()) or "no reason given"
