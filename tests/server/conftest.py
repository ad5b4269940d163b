"""A server on a free port of this machine, in a thread, over the fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import openai
import pytest
import uvloop

from octavo import logging as octavo_logging
from octavo.async_llm import AsyncLLM
from octavo.config.schema import LoRAConfig
from octavo.config.server_args import ServerArgs
from octavo.server.app import loading_app
from octavo.server.http.sockets import listening, tls_context, url_of
from octavo.server.serving import HttpServer, StopSignals, serve_until_stopped
from tests.server.fake_llm import FakeAsyncLLM
from tests.server.fake_llm import fakes_read_texts_inline as fakes_read_texts_inline
from tests.server.raw import EventReader


class Served:
    """A running server: its address, its engine, and ways to stop it."""

    def __init__(self, args: ServerArgs, lora: LoRAConfig | None = None) -> None:
        self.args, self._lora = args, lora
        self.exit_code: int | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(100)

    def _run(self) -> None:
        with (
            listening(self.args) as listener,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            self.listener, self.url = listener, url_of(listener)
            self.exit_code = runner.run(self._serve(listener))

    async def _serve(self, listener: Any) -> int:
        self.loop = asyncio.get_running_loop()
        self.llm = FakeAsyncLLM(lora=self._lora)
        self.signals = StopSignals()
        self.loop.call_soon(self._up.set)
        return await self._serve_http(cast(AsyncLLM, self.llm), listener)

    async def _serve_http(self, llm: AsyncLLM, listener: Any) -> int:
        server = self.http = HttpServer(loading_app(self.args), listener, tls_context(self.args))
        await server.start()
        return await serve_until_stopped(llm, server, self.signals)

    def on_loop(self, act: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon_threadsafe(act, *arguments)

    def stop(self) -> int:
        """What a signal does; the exit code."""
        if self._thread.is_alive():
            self.on_loop(self.signals.stop)
        return self.join()

    def join(self) -> int:
        self._thread.join(100)
        assert not self._thread.is_alive()
        assert self.exit_code is not None
        return self.exit_code


@pytest.fixture
def log_to_stderr() -> None:
    """Logging as a server sets it up, until the test ends."""
    octavo_logging.set_up(role="server")


@pytest.fixture
def start_server() -> Iterator[Callable[..., Served]]:
    """Starts servers with arguments of the test's own."""
    started: list[Served] = []

    def start(lora: LoRAConfig | None = None, **args: Any) -> Served:
        started.append(Served(ServerArgs(port=0, **args), lora))
        return started[-1]

    yield start
    for served in started:
        served.stop()


@pytest.fixture
def read_events() -> Iterator[Callable[..., EventReader]]:
    """Opens streams of events by server, path and key, until the test ends."""
    with ExitStack() as opened:

        def open_stream(server: Served, path: str, key: str, **headers: str) -> EventReader:
            reader = EventReader(server.url, path, {"Authorization": f"Bearer {key}-key", **headers})
            opened.callback(reader.close)
            return reader

        yield open_stream


@pytest.fixture(scope="package")
def _shared_server() -> Iterator[Served]:
    served = Served(ServerArgs(port=0))
    yield served
    served.stop()


@pytest.fixture
def server(_shared_server: Served) -> Served:
    """One server for many tests, its engine as new for each."""
    _shared_server.llm.reset()
    return _shared_server


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100) as client:
        yield client
