"""`AsyncLLMEngine`: an `AsyncLLM` that is made without `await` and starts its core process when it is first used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from octavo.async_llm import AsyncLLM
from octavo.config.args import EngineArgs
from octavo.core.absent import says_what_it_lacks
from octavo.core.outputs import RequestOutput
from octavo.core.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from octavo.core.prompt import PromptLike
from octavo.core.sampling_params import SamplingParams
from octavo.engine.chat_tokenizer import ChatTokenizer
from octavo.engine.vector_output import array_of


@says_what_it_lacks
class AsyncLLMEngine:
    """`AsyncLLM` under the name and with the constructor of vLLM. Use one engine on one event loop only.

    A wrong argument is an error of the constructor; a wrong model is an error of the first call that needs it.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._starting: asyncio.Task[AsyncLLM] | None = None
        self._ending: asyncio.Task[None] | None = None

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

    async def check_health(self) -> None:
        """Raise EngineDeadError when the core has died or was shut down, EngineUnresponsiveError when it hangs."""
        await (await self.start()).check_health()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop all cached prefixes and pins, as `AsyncLLM.reset_prefix_cache` does."""
        return await (await self.start()).reset_prefix_cache(reset_running_requests)

    async def is_paused(self) -> bool:
        """Return whether a pause holds requests back."""
        return await (await self.start()).is_paused()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold all requests back until `resume_generation`, as `AsyncLLM.pause_generation` does."""
        await (await self.start()).pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Let requests go on after `pause_generation`."""
        await (await self.start()).resume_generation()

    async def is_sleeping(self) -> bool:
        """Return whether the engine has neither weights nor KV cache."""
        return await (await self.start()).is_sleeping()

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give back memory, as `AsyncLLM.sleep` does; requests wait until the engine wakes up. Raises RequestFailed."""
        await (await self.start()).sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the weights again, as `LLM.wake_up` does. Raises RequestFailed."""
        await (await self.start()).wake_up(tags)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a profile, as `AsyncLLM.start_profile` does."""
        await (await self.start()).start_profile(profile_prefix)

    async def stop_profile(self) -> None:
        """End the profile, and write it."""
        await (await self.start()).stop_profile()

    async def update_weights_from_disk(self, model_path: str | Path) -> None:
        """Take other weights, as `LLM.update_weights_from_disk` does; running requests go on. Raises RequestFailed."""
        await (await self.start()).update_weights_from_disk(model_path)

    def shutdown(self) -> Awaitable[None]:
        """Begin to end the core process, if it was started; open requests get EngineDeadError. Idempotent. Who awaits
        what it returns goes on when the process has ended.

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
    """What there is to wait for without an event loop: nothing."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()
