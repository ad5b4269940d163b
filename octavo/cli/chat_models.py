"""The two models of `octavo chat`: of an engine in this process, and of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, Protocol

from octavo.cli.openai_client import OpenAIClient
from octavo.cli.pace import Pace
from octavo.cli.start import stream
from octavo.core.adapter import LoRARequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.interrupt import Interrupt
from octavo.errors import RequestFailed, ServerUnreachable

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine

Messages = Sequence[dict[str, Any]]
_POLL_S: Final = 0.1
_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each further attempt to reach a server."""


class ChatModel(Protocol):
    """A model that continues conversations."""

    def sampling(self, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a response for the given values. Raises InvalidRequest."""

    def respond(
        self,
        messages: Messages,
        values: Mapping[str, Any],
        write: Callable[[str], None],
        interrupt: Interrupt,
        pace: Pace | None = None,
    ) -> str:
        """Write a response piece by piece and return it; an interrupt ends it. pace: gets its tokens. Raises
        OctavoError."""


class EngineModel:
    """The model of an engine in this process."""

    def __init__(self, engine: LLMEngine, adapter: LoRARequest | None = None) -> None:
        self._engine, self._adapter = engine, adapter

    def sampling(self, values: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams.over_defaults({"max_tokens": None} | self._engine.generation_defaults, values)

    def respond(
        self,
        messages: Messages,
        values: Mapping[str, Any],
        write: Callable[[str], None],
        interrupt: Interrupt,
        pace: Pace | None = None,
    ) -> str:
        pieces: list[str] = []
        prompt = self._engine.render_chat(list(messages))
        for output in stream(self._engine, prompt, self.sampling(values), interrupt, self._adapter):
            pieces.append(output.outputs[0].text)
            write(pieces[-1])
            if pace is not None:
                pace.note(output.num_generated_tokens)
        return "".join(pieces)


class ServerModel:
    """A model of an OpenAI-compatible server, whose defaults apply. notice: writes a line about the connection."""

    def __init__(self, server: OpenAIClient, name: str | None, notice: Callable[[str], None]) -> None:
        self._server, self._notice = server, notice
        with asyncio.Runner() as runner:
            self.name = name or next(iter(runner.run(server.models())), "")

    def sampling(self, values: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams.over_defaults({"max_tokens": None}, values)

    def respond(
        self,
        messages: Messages,
        values: Mapping[str, Any],
        write: Callable[[str], None],
        interrupt: Interrupt,
        pace: Pace | None = None,
    ) -> str:
        body = {"model": self.name, "messages": list(messages), "stream": True, **values}
        if pace is not None:
            body["stream_options"] = {"include_usage": True}
        with asyncio.Runner() as runner:
            return runner.run(self._respond(body, write, interrupt, pace))

    async def _respond(
        self, body: dict[str, Any], write: Callable[[str], None], interrupt: Interrupt, pace: Pace | None
    ) -> str:
        """Send the request again when the connection drops: nothing is lost but the begin of a response."""
        pieces: list[str] = []
        for pause_s in (*_PAUSES_S, None):
            task = asyncio.create_task(self._read(body, pieces, write, pace))
            while not task.done() and not interrupt.requested:
                await asyncio.wait({task}, timeout=_POLL_S)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                break
            try:
                await task
                break
            except ServerUnreachable as error:
                if pause_s is None:
                    raise
                self._notice(f"{error}; the request is sent again in {pause_s:g} s")
                pieces.clear()
                await self._pause(pause_s, interrupt)
            if interrupt.requested:
                break
        return "".join(pieces)

    async def _read(
        self, body: dict[str, Any], pieces: list[str], write: Callable[[str], None], pace: Pace | None
    ) -> None:
        async with aclosing(self._server.events("/v1/chat/completions", body)) as events:
            async for event in events:
                try:
                    deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
                    # thoughts are shown, and are no part of the conversation
                    thoughts = [str(each.get("reasoning_content") or each.get("reasoning") or "") for each in deltas]
                    texts = [str(each.get("content") or "") for each in deltas]
                    num_tokens = int((event.get("usage") or {}).get("completion_tokens") or 0)
                except (AttributeError, TypeError, ValueError) as error:
                    raise RequestFailed("the server sends an event that is no part of a chat completion") from error
                for thought, text in zip(thoughts, texts, strict=True):
                    write(thought)
                    pieces.append(text)
                    write(text)
                if pace is not None:  # a piece counts as a token until the server states their number
                    pace.note(pace.num_tokens + any((*thoughts, *texts)))
                    pace.num_tokens = num_tokens or pace.num_tokens

    async def _pause(self, seconds: float, interrupt: Interrupt) -> None:
        for _ in range(int(seconds / _POLL_S)):
            if not interrupt.requested:
                await asyncio.sleep(_POLL_S)
