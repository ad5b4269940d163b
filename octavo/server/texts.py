"""Makes prompts from the bodies of requests: in this process if that takes little time, else in a helper process.

`preparing` does the work in either process; `text_process` is the helper.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from octavo.core.prompt import Prompt
from octavo.engine.text.chat_template import TemplateTooExpensive
from octavo.engine.text.template_budget import RenderLimits
from octavo.server.decode import RequestBody, decode, decoder, read_body
from octavo.server.formats.reading import ModelFormat
from octavo.server.keys import sender_of
from octavo.server.preparing import Prepared, Preparer, TextPolicy, TextSetup, TokensResponse
from octavo.server.schema.bodies import PromptBody, TokensBody
from octavo.server.sending import OpenRequests
from octavo.server.shared_bytes import feature_bytes, take_features
from octavo.server.text_pool import TextPool

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM

INLINE_BYTES: Final = 8 << 10
"""Bodies up to this size are decoded and rendered on the event loop: a helper process would take longer."""

_INLINE_LIMITS: Final = RenderLimits(steps=5_000, seconds=0.01, value_size=256 << 10)
_TOKENS_BETWEEN_TURNS: Final = 64 << 10

T = TypeVar("T", bound=RequestBody)
P = TypeVar("P", bound=PromptBody)
R = TypeVar("R")

_decode: Final = msgspec.msgpack.Decoder(Prepared).decode


def name_of(kind: type[RequestBody]) -> str:
    """Return the name by which a helper process finds the struct of a body, with `pkgutil.resolve_name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


class Texts:
    """Reads the requests that bring text or tokens."""

    def __init__(self, preparer: Preparer, pool: TextPool, open_requests: OpenRequests) -> None:
        self._preparer = replace(preparer, limits=_INLINE_LIMITS)
        self.pool = pool
        self._open_requests = open_requests
        self._turn = asyncio.Lock()

    @classmethod
    def of(cls, llm: AsyncLLM, policy: TextPolicy, open_requests: OpenRequests) -> Texts:
        pool = TextPool(TextSetup(llm.input_setup, policy), starts_now=llm.input.media.reads_images)
        return cls(Preparer(llm.input, policy), pool, open_requests)

    @property
    def format(self) -> ModelFormat:
        return self._preparer.format

    async def read(self, request: Request, kind: type[P]) -> tuple[P, list[Prompt]]:
        """Return a request, without its text if that was long, and its prompts. Raises InvalidRequest or ApiError."""
        pieces = await read_body(request)
        here = await self._here(pieces, kind, INLINE_BYTES, lambda asked: asked.prompts(self._preparer))
        if here is not None:
            return here
        done = _decode(await self._elsewhere(request, kind, pieces))
        take_features(request.scope, feature_bytes(each.media for each in done.prompts))
        return decoder(kind).decode(done.asked), await _prompts(done)

    async def respond(self, request: Request, kind: type[TokensBody]) -> TokensResponse:
        """Return the response of an endpoint about tokens. Raises InvalidRequest or ApiError."""
        pieces = await read_body(request)
        if (here := await self._here(pieces, kind, INLINE_BYTES // 2, self._preparer.response)) is not None:
            return here[1]
        return msgspec.msgpack.decode(await self._elsewhere(request, kind, pieces), type=TokensResponse)

    async def _here(
        self, pieces: Sequence[bytes], kind: type[T], most_bytes: int, make: Callable[[T], R]
    ) -> tuple[T, R] | None:
        """Return a request and the result of `make`; None if that takes too long for this process."""
        if sum(map(len, pieces)) > most_bytes:
            return None
        # one at a time: the event loop serves others between two of them
        async with self._turn:
            asked = decode(b"".join(pieces), kind)
            if asked.may_take_long:
                return None
            try:
                return asked, make(asked)
            except TemplateTooExpensive:
                return None

    async def _elsewhere(self, request: Request, kind: type[RequestBody], pieces: Sequence[bytes]) -> bytes:
        """Return a helper process's result for a body. The job ends when the client disconnects or the server stops."""
        async with self._open_requests.track(request.receive):
            return await self.pool.run(name_of(kind), pieces, sender_of(request.scope))


async def _prompts(done: Prepared) -> list[Prompt]:
    prompts: list[Prompt] = []
    num_tokens = 0
    for each in done.prompts:
        token_ids = array("i", each.token_ids).tolist()
        predicted = array("i", each.prediction).tolist()
        beside: dict[str, Any] = {"second_start": each.second_start, "num_unseen": each.num_unseen, "media": each.media}
        prompts.append(Prompt(each.text, token_ids, False, prediction=predicted, **beside))
        num_tokens += len(token_ids) + len(predicted)
        if num_tokens > _TOKENS_BETWEEN_TURNS:
            num_tokens = 0
            await asyncio.sleep(0)
    return prompts
