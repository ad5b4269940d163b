"""`AsyncLLMEngine`: an `AsyncLLM` that is made without `await` and starts its core process when it is first used."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.core.absent import says_what_it_lacks
from octavo.core.adapter import LoRARequest
from octavo.core.outputs import RequestOutput
from octavo.core.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from octavo.core.prompt import PromptLike
from octavo.core.sampling_params import SamplingParams
from octavo.engine.output.vector_output import array_of
from octavo.engine.text.chat_tokenizer import ChatTokenizer
from octavo.errors import EngineDeadError

_POLL_S: Final = 0.02
"""How often open requests are counted."""

P = ParamSpec("P")
T = TypeVar("T")


def started(
    method: Callable[Concatenate[AsyncLLM, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of `AsyncLLMEngine` that starts the engine if needed, and then calls this method of it."""

    async def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        result: T = await getattr(await self.start(), method.__name__)(*arguments, **keywords)
        return result

    return functools.update_wrapper(call, method)


@says_what_it_lacks
class AsyncLLMEngine:
    """`AsyncLLM` under the name and with the constructor of vLLM. Use one engine on one event loop only.

    A wrong argument is an error of the constructor; a wrong model is an error of the first call that needs it.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._starting: asyncio.Task[AsyncLLM] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._adapters: dict[int, LoRARequest] = {}
        self._num_open = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLMEngine:
        return cls(engine_args)

    async def start(self) -> AsyncLLM:
        """Start the core process unless it is there, and return what this engine wraps.

        Raises ConfigError, CheckpointError or UnsupportedModel, every time.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(AsyncLLM.start(self._args), name="octavo-start")
        return await asyncio.shield(self._starting)  # a caller that is cancelled leaves the others their engine

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request, as `AsyncLLM.generate` does with the same `options`."""
        llm = await self.start()
        async with aclosing(llm.generate(prompt, sampling_params, request_id, **options)) as outputs:
            with self._counted():
                async for output in outputs:
                    yield output

    async def encode(
        self, prompt: PromptLike, pooling_params: PoolingParams, request_id: str | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield what a model for vectors or scores makes of a prompt, once, as `LLM.encode` returns it."""
        llm = await self.start()
        config = llm.input.vectors.checked(None)
        task = pooling_params.task or config.task
        async with aclosing(llm.generate(prompt, pooling_params, request_id, **options)) as outputs:
            with self._counted():
                async for output in outputs:
                    yield PoolingRequestOutput.of(output, PoolingOutput(array_of(config, output, task)))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one request or several; ids of no running request are ignored."""
        if self._starting is not None:
            await (await self.start()).abort(request_id)

    async def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer and the chat template, with the methods of transformers' tokenizers."""
        llm = await self.start()
        return ChatTokenizer(llm.tokenizer, llm.render_chat)

    @property
    def errored(self) -> bool:
        """Return whether the engine could not be started, or its core has died for good or was shut down."""
        if self._starting is None or not self._starting.done():
            return False
        failed = self._starting.cancelled() or self._starting.exception() is not None
        return failed or not self._starting.result().is_running

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        """Return what to raise where `errored` is True."""
        return EngineDeadError("the engine has ended, or could not be started; check_health and the log say why")

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output has not been read."""
        return self._num_open

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until all requests have ended. Raises TimeoutError after `drain_timeout` seconds."""
        async with asyncio.timeout(drain_timeout):
            while self._num_open:
                await asyncio.sleep(_POLL_S)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the model is run for: ("generate",), or the tasks of `PoolingParams`."""
        pooling = (await self.start()).config.model.pooling
        return ("generate",) if pooling is None else pooling.tasks

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Let the core read an adapter, so that the first request does not wait for it. Returns False for one that was
        added before. Raises InvalidRequest."""
        found = await (await self.start()).read_adapter(lora_request)
        is_new = self._adapters.get(found.lora_int_id) != found
        self._adapters[found.lora_int_id] = found
        return is_new

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter that was added; what it takes in memory goes to others when they need it. Requests that
        bring it use it all the same. Returns False for one that was not added."""
        return self._adapters.pop(lora_id, None) is not None

    async def list_loras(self) -> set[int]:
        """Return the numbers of the adapters that were added."""
        return set(self._adapters)

    async def reset_mm_cache(self) -> None:
        """Do nothing: no image or sound outlives its request, but in the prefix cache."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing, as `reset_mm_cache`."""

    check_health = started(AsyncLLM.check_health)
    reset_prefix_cache = started(AsyncLLM.reset_prefix_cache)
    is_paused = started(AsyncLLM.is_paused)
    pause_generation = started(AsyncLLM.pause_generation)
    resume_generation = started(AsyncLLM.resume_generation)
    is_sleeping = started(AsyncLLM.is_sleeping)
    sleep = started(AsyncLLM.sleep)
    wake_up = started(AsyncLLM.wake_up)
    start_profile = started(AsyncLLM.start_profile)
    stop_profile = started(AsyncLLM.stop_profile)
    update_weights_from_disk = started(AsyncLLM.update_weights_from_disk)
    update_weights_from_tensor = started(AsyncLLM.update_weights_from_tensor)
    get_weight_version = started(AsyncLLM.get_weight_version)
    update_weight_version = started(AsyncLLM.update_weight_version)
    finish_weight_update = started(AsyncLLM.finish_weight_update)

    def shutdown(self) -> Awaitable[None]:
        """Begin to end the core process, if it was started; open requests get EngineDeadError. Idempotent. Awaiting the
        result waits until the process has ended.

        It may be called when the event loop has ended, or just before: the process is told at once.
        """
        starting = self._starting
        if starting is not None and starting.done() and not starting.cancelled() and starting.exception() is None:
            starting.result().begin_shutdown()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return _Ended()
        self._ending = loop.create_task(self._shut_down(), name="octavo-shutdown")
        return self._ending

    async def _shut_down(self) -> None:
        if self._starting is None:
            return
        self._starting.cancel()  # without effect on an engine that has started
        [started] = await asyncio.gather(self._starting, return_exceptions=True)
        if isinstance(started, AsyncLLM):
            await started.shutdown()


class _Ended(Awaitable[None]):
    """An awaitable that is done at once, for `shutdown` without an event loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
