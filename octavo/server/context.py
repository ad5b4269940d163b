"""The objects that every endpoint works with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Final

from octavo.config.server_args import ServerArgs
from octavo.server.open_requests import OpenRequests
from octavo.server.sending import LargeAnswers
from octavo.server.texts import served_name

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.server.texts import Texts

MOST_KV_READERS: Final = 16


@dataclass(frozen=True)
class ServerContext:
    """The engine, the arguments of the server, the readers of texts, and the requests in progress.

    `created` is in Unix seconds. kv_readers: has a place for each reader of KV events.
    """

    llm: AsyncLLM
    args: ServerArgs
    texts: Texts
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    large_answers: LargeAnswers = field(default_factory=LargeAnswers)
    kv_readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_KV_READERS))
    created: int = field(default_factory=lambda: int(time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.llm.config.model.served_model_names

    def served_model(self, asked: str | None) -> str:
        """Return the name of the model for a response; a request may leave it out. Raises ApiError 404."""
        return served_name(asked, self.model_names)
