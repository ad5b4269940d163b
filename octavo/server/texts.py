"""The bodies of requests become prompts: in this process where that takes little time, else in a helper process."""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.prompt import Prompt
from octavo.engine.chat_template import TemplateTooExpensive
from octavo.engine.template_budget import RenderLimits
from octavo.server.decode import RequestBody, decode, read_body
from octavo.server.keys import sender_of
from octavo.server.open_requests import OpenRequests
from octavo.server.preparation import Prepared, Preparer, TextPolicy
from octavo.server.schema import DetokenizeRequest, TokenizeRequest
from octavo.server.text_process import TextSetup

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.server.text_pool import TextPool

INLINE_BYTES: Final = 8 << 10
"""Bodies up to this size are decoded and rendered on the event loop: it takes less than going elsewhere."""

_INLINE_LIMITS: Final = RenderLimits(steps=5_000, seconds=0.01, value_size=256 << 10)
_TOKENS_BETWEEN_TURNS: Final = 64 << 10

T = TypeVar("T", bound=RequestBody)
R = TypeVar("R")


class Texts:
    """Reads the requests that bring text or tokens. `pool` is None where everything has to happen in this process."""

    def __init__(self, preparer: Preparer, pool: TextPool | None, open_requests: OpenRequests) -> None:
        self._preparer = preparer
        self._pool = pool
        self._open_requests = open_requests
        self._turn = asyncio.Lock()

    @classmethod
    def of(cls, llm: AsyncLLM, policy: TextPolicy, open_requests: OpenRequests) -> Texts:
        """Return the texts of an engine, with helper processes where the engine has a setup for them."""
        from octavo.server.text_pool import TextPool

        names = llm.config.model.served_model_names
        preparer = Preparer(llm, names, policy)
        if llm.input_setup is None:
            return cls(preparer, None, open_requests)
        setup = TextSetup(llm.input_setup, names, policy)
        return cls(preparer, TextPool(setup), open_requests)

    async def read(self, request: Request, kind: type[T]) -> tuple[T, list[Prompt]]:
        """Return a request, without its text if that was long, and its prompts. Raises InvalidRequest or ApiError."""
        pieces = await read_body(request)
        if (here := await self._here(pieces, kind, INLINE_BYTES, self._preparer.prompts)) is not None:
            return here
        done = _decoder(Prepared).decode(await self._elsewhere(request, kind, pieces))
        return _decoder(kind).decode(done.asked), await _prompts(done)

    async def answer(self, request: Request, kind: type[TokenizeRequest] | type[DetokenizeRequest]) -> Response:
        """Return the response of /tokenize or /detokenize. Raises InvalidRequest or ApiError."""
        pieces = await read_body(request)
        here = await self._here(pieces, kind, INLINE_BYTES // 2, self._preparer.answer)
        body = await self._elsewhere(request, kind, pieces) if here is None else here[1]
        return Response(body, media_type="application/json")

    async def _here(
        self, pieces: Sequence[bytes], kind: type[T], most_bytes: int, make: Callable[..., R]
    ) -> tuple[T, R] | None:
        """Return a request and what `make` makes of it; None where that takes more time than this process has."""
        is_only_place = self._pool is None
        if not is_only_place and sum(map(len, pieces)) > most_bytes:
            return None
        # one at a time: whatever else waits for the loop runs between two of them
        async with self._turn:
            asked = decode(b"".join(pieces), kind)
            if is_only_place:
                return asked, make(asked)
            if getattr(asked, "chat_template", None) is not None:
                return None
            try:
                return asked, make(asked, _INLINE_LIMITS)
            except TemplateTooExpensive:
                return None

    async def _elsewhere(self, request: Request, kind: type[RequestBody], pieces: Sequence[bytes]) -> bytes:
        """Return what a helper process makes of a body. The job ends when the client goes away or the server stops."""
        assert self._pool is not None
        async with self._open_requests.track(request.receive):
            return await self._pool.run(kind.__name__, pieces, sender_of(request.scope))


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
