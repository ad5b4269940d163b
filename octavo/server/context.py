"""The objects that every endpoint works with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import UNSET, UnsetType

from octavo.config.schema import EngineConfig, ModelConfig
from octavo.config.server_args import ServerArgs
from octavo.core.adapter import LoRARequest
from octavo.server.errors import ApiError
from octavo.server.live_feed import LiveFeed
from octavo.server.preparing import TextPolicy
from octavo.server.sending import LargeResponses, OpenRequests
from octavo.server.served_models import ServedModels
from octavo.server.texts import Texts

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.engine.output.metric_views import Counts
    from octavo.server.tracing import Tracer

T = TypeVar("T")

MOST_KV_READERS: Final = 16


@dataclass
class ServerContext:
    """The engine, the arguments of the server, the readers of texts, and the requests in progress.

    While the model loads there is no engine: properties that need it raise ApiError 503. `created` is in Unix seconds.
    kv_readers: limits the readers of KV events. engine_ids: ids of the open requests to the engine. tracer:
    records the requests that have ended.
    """

    args: ServerArgs
    open_requests: OpenRequests = field(init=False)
    large_responses: LargeResponses = field(default_factory=LargeResponses)
    kv_readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_KV_READERS))
    engine_ids: set[str] = field(default_factory=set)
    live: LiveFeed = field(default_factory=LiveFeed)
    created: int = field(default_factory=lambda: int(time()))
    tracer: Tracer | None = None
    is_first: bool = True
    """Whether this server prints its address, and logs the load: the first of several API servers does."""
    counts_of_others: Callable[[], Awaitable[list[Counts]]] | None = None
    """Returns the metric counts of the other API servers; None if this is the only one."""
    abort_at_others: Callable[[list[str]], Awaitable[int]] | None = None
    """Aborts requests of the other API servers, as `abort_own` does those of this one; None if this is the only one."""

    _model: ModelConfig | None = None
    _llm: AsyncLLM | None = None
    _texts: Texts | None = None
    _models: ServedModels | None = None

    def __post_init__(self) -> None:
        self.open_requests = OpenRequests(self.args.sse_keep_alive_interval)

    @contextmanager
    def open_ids(self, request_ids: Collection[str]) -> Iterator[None]:
        """List these requests to the engine as open within the `with`."""
        self.engine_ids.update(request_ids)
        try:
            yield
        finally:
            self.engine_ids.difference_update(request_ids)

    def load(self, config: EngineConfig) -> EngineConfig:
        """Note which model is loaded, and return its settings."""
        self._model = config.model
        return config

    def attach(self, llm: AsyncLLM, models: ServedModels | None = None) -> None:
        """Serve requests with an engine that is ready. models: names that requests may use; by default the model's own,
        without lora_modules. Raises ConfigError."""
        self.load(llm.config)
        self._models = models or ServedModels(llm)
        self._llm, self._texts = llm, Texts.of(llm, TextPolicy.of(self.args), self.open_requests)

    async def serve(self, llm: AsyncLLM) -> None:
        """Load the adapters of lora_modules, and serve requests with an engine that is ready. Raises ConfigError."""
        models = ServedModels(llm)
        await models.load_modules()
        self.attach(llm, models)

    @property
    def is_loaded(self) -> bool:
        """Return whether the model and its adapters are loaded."""
        return self._llm is not None

    @property
    def llm(self) -> AsyncLLM:
        """Return the engine. Raises ApiError 503 while the model loads."""
        return self._loaded(self._llm)

    @property
    def texts(self) -> Texts:
        """Return the readers of texts. Raises ApiError 503 while the model loads."""
        return self._loaded(self._texts)

    @property
    def model(self) -> ModelConfig:
        """Return the model's settings. Raises ApiError 503 until they are read."""
        return self._loaded(self._model)

    @property
    def max_model_len(self) -> int:
        return self.model.max_model_len if self._llm is None else self._llm.ready.max_model_len

    @property
    def reads_images(self) -> bool | UnsetType:
        """Whether the model reads images; UNSET while it loads."""
        return UNSET if self._llm is None else self._llm.input.media.reads_images

    @property
    def models(self) -> ServedModels:
        """Return what requests may name as their model. Raises ApiError 503 while the model loads."""
        return self._loaded(self._models)

    @property
    def adapters(self) -> list[LoRARequest]:
        return [] if self._models is None else self._models.adapters

    def _loaded(self, part: T | None) -> T:
        """Return a part that exists once the model is loaded. Raises ApiError 503 before."""
        if part is not None:
            return part
        what = "the model" if self._model is None else f"the model {self._model.name}"
        raise ApiError(
            503,
            f"{what} is loading; ask GET /ready until it responds with 200, then send this again",
            code="model_loading",
            headers={"Retry-After": "5"},
        )
