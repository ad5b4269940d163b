"""The bodies of requests to prompts, in this process where that takes no time, else in a helper process."""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.prompt import Prompt
from octavo.engine.chat_template import TemplateTooExpensive
from octavo.engine.template_budget import RenderLimits
from octavo.server.decode import RequestBody, decode, read_body
from octavo.server.open_requests import OpenRequests
from octavo.server.preparation import Preparer, TextPolicy
from octavo.server.schema import DetokenizeRequest, TokenizeRequest
from octavo.server.text_process import Prepared, TextSetup

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.server.text_pool import TextPool

INLINE_BYTES: Final = 8 << 10
"""Bodies up to this size are decoded and rendered on the event loop: it takes less than going elsewhere."""

_INLINE_LIMITS: Final = RenderLimits(steps=5_000, seconds=0.01, value_size=256 << 10)
_TOKENS_BETWEEN_TURNS: Final = 64 << 10

T = TypeVar("T", bound=RequestBody)


class Texts:
    """Reads the requests that bring text or tokens. `pool` is None where everything has to happen here."""

    def __init__(self, preparer: Preparer, pool: TextPool | None, open_requests: OpenRequests) -> None:
        self._preparer = preparer
        self._pool = pool
        self._open_requests = open_requests
        self._turn = asyncio.Lock()

    @classmethod
    def of(cls, llm: AsyncLLM, policy: TextPolicy, open_requests: OpenRequests) -> Texts:
        """Texts for an engine, with processes where it says how they can do its work."""
        from octavo.server.text_pool import TextPool

        names = llm.config.model.served_model_names
        preparer = Preparer(llm, names, policy)
        if llm.input_setup is None:
            return cls(preparer, None, open_requests)
        setup = TextSetup(llm.input_setup, names, policy)
        return cls(preparer, TextPool(setup), open_requests)

    async def read(self, request: Request, kind: type[T]) -> tuple[T, list[Prompt]]:
        """Return a request without its text, and its prompts. Raises InvalidRequest or ApiError."""
        pieces = await read_body(request)
        if self._pool is None:
            asked = decode(b"".join(pieces), kind)
            return asked, self._preparer.prompts(asked)
        if sum(map(len, pieces)) <= INLINE_BYTES:
            # one at a time: whatever else waits for the loop comes between two of them
            async with self._turn:
                asked = decode(b"".join(pieces), kind)
                prompts = self._prompts_here(asked)
            if prompts is not None:
                return asked, prompts
        done = _decoder(Prepared).decode(await self._run(request, kind, pieces))
        asked = _decoder(kind).decode(done.asked)
        return asked, await _prompts(done)

    async def answer(self, request: Request, kind: type[TokenizeRequest] | type[DetokenizeRequest]) -> Response:
        """The answer of /tokenize or /detokenize. Raises InvalidRequest or ApiError."""
        pieces = await read_body(request)
        if self._pool is None or sum(map(len, pieces)) <= INLINE_BYTES // 2:
            async with self._turn:
                answer = self._answer_here(decode(b"".join(pieces), kind))
            if answer is not None:
                return _json(answer)
        return _json(await self._run(request, kind, pieces))

    async def _run(self, request: Request, kind: type[RequestBody], pieces: Sequence[bytes]) -> bytes:
        """Have a helper process do the work, until the client goes away or the server stops."""
        assert self._pool is not None
        async with self._open_requests.track(request.receive):
            return await self._pool.run(kind.__name__, pieces)

    def _prompts_here(self, asked: RequestBody) -> list[Prompt] | None:
        """The prompts of a small request; None where its template needs more time than this process has for it."""
        if getattr(asked, "chat_template", None) is not None:
            return None
        try:
            return self._preparer.prompts(asked, _INLINE_LIMITS)
        except TemplateTooExpensive:
            return None

    def _answer_here(self, asked: RequestBody) -> bytes | None:
        """The encoded answer to a small request; None where its template needs more time."""
        if isinstance(asked, DetokenizeRequest):
            return self._preparer.detokenized(asked)
        assert isinstance(asked, TokenizeRequest)
        prompts = self._preparer.prompts(asked) if self._pool is None else self._prompts_here(asked)
        return None if prompts is None else _result(self._preparer.tokenized(asked, prompts[0]))


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


async def _prompts(done: Prepared) -> list[Prompt]:
    prompts: list[Prompt] = []
    num_tokens = 0
    for each in done.prompts:
        token_ids = array("i", each.token_ids).tolist()
        prompts.append(Prompt(text=each.text, token_ids=token_ids, add_special_tokens=False))
        num_tokens += len(token_ids)
        if num_tokens > _TOKENS_BETWEEN_TURNS:
            num_tokens = 0
            await asyncio.sleep(0)
    return prompts


def _result(slices: Generator[None, None, bytes]) -> bytes:
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: bytes = end.value
            return result


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
