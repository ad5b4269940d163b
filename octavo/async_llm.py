"""`AsyncLLM`: many requests at once on one event loop, with the engine core in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack
from uuid import uuid4

import msgspec

from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.config.schema import EngineConfig
from octavo.core.adapter import LoRARequest
from octavo.core.messages import AbortRequests, AddRequests, CoreReady, EngineCoreRequest, SchedulerStats, StepOutputs
from octavo.core.outputs import PinnedPrefix, RequestOutput
from octavo.core.pooling import PoolingParams
from octavo.core.profiler_config import profile_name
from octavo.core.prompt import Prompt, PromptLike
from octavo.core.request_limits import checked_ttl_s
from octavo.core.request_options import RequestKeywords, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.cores.aborted_ids import AbortedIds
from octavo.engine.cores.core_spawn import SpawnedCore
from octavo.engine.cores.replica import ReplicaState
from octavo.engine.cores.replicas import Replicas, StartReplicas
from octavo.engine.input.input_processor import InputProcessor, InputSetup, PrefixLike
from octavo.engine.input.input_turns import PROMPTS_OF_TURN, InputTurns, open_compiled
from octavo.engine.output.metrics import Metrics
from octavo.engine.output.open_request import OpenRequest
from octavo.engine.output.output_processor import OutputProcessor, in_turns
from octavo.engine.output.readers import DirectReader, Reader
from octavo.engine.pause import check_mode
from octavo.engine.sleep import check_level, check_tags, checked_version
from octavo.engine.text.chat_template import ChatOptions, ChatTemplate, Message
from octavo.engine.text.tokenizer import Tokenizer
from octavo.engine.weight_folder import WeightFolder, WeightUpdates
from octavo.errors import EngineDeadError, EngineRestartingError, InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from octavo.async_llm_engine import AsyncLLMEngine

_POLL_S: Final = 0.02
"""How often cores are asked whether they have read an adapter, or whether a pause is complete."""

_log = logging.getLogger(__name__)


class AsyncLLM:
    """A model behind an event loop. Make one with `await AsyncLLM.start(args)`; use it on that loop only.

    metrics: Prometheus collectors. ready: what the core measured. input: makes requests from prompts.
    """

    def __init__(
        self, config: EngineConfig, client: Replicas, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.ready: CoreReady = client.ready
        self.metrics = Metrics(config.model.served_model_names[0], client.roles, client.can_grow)
        for replica in client.states:
            self.metrics.observe_stats(replica.stats, replica.number)
        self._client = client
        self.input_setup = InputSetup.of(config, client.ready)
        self.input = InputProcessor(self.input_setup, tokenizer=tokenizer, chat_template=chat_template)
        self._turns = InputTurns(self.input)
        self._updates = WeightUpdates(self.call)
        self._aborted_ids = AbortedIds(self.call)
        interval = config.scheduler.stream_interval
        self._output = OutputProcessor(tokenizer, counts=self.metrics.requests, stream_interval=interval)
        self._dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self._receiver = asyncio.create_task(self._receive(), name="octavo-receiver")

    @classmethod
    async def start(cls, args: EngineArgs, core: SpawnedCore | None = None) -> AsyncLLM:
        """Find the model and start its engine in the process `core`, or in one of its own; replicas in more of them.

        Raises ConfigError, CheckpointError or UnsupportedModel.
        """
        with core or SpawnedCore() as core:
            return await cls.start_over(args, partial(Replicas.start, core=core))

    @staticmethod
    def from_engine_args(engine_args: EngineArgs) -> AsyncLLMEngine:
        """Return an engine that starts when it is first used, as `AsyncLLMEngine.from_engine_args` does."""
        from octavo.async_llm_engine import AsyncLLMEngine

        return AsyncLLMEngine(engine_args)

    @classmethod
    async def start_over(cls, args: EngineArgs, start_replicas: StartReplicas) -> AsyncLLM:
        """Find the model, and start or find replicas meanwhile; return the front that uses them.

        Raises as `start` does, and what `start_replicas` raises.
        """
        config = await asyncio.to_thread(configure, args)
        starting = asyncio.create_task(start_replicas(config))
        try:
            tokenizer, chat_template = await asyncio.to_thread(open_compiled, config.model)
        except BaseException:
            starting.cancel()
            [started] = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(started, Replicas):  # it was quicker than the tokenizer
                await started.shutdown()
            raise
        client = await starting
        if client.ready.plan:
            num_replicas = config.replicas.data_parallel_size
            _log.info("%s%s", f"each of {num_replicas} replicas: " if num_replicas > 1 else "", client.ready.plan)
        return cls(config, client, tokenizer, chat_template)

    @property
    def is_running(self) -> bool:
        """Return False once no core is left that may be started again, or `shutdown` was called."""
        return self._client.is_running and not self._dead.done()

    @property
    def stats(self) -> SchedulerStats:
        """Return the state of the engine after its latest step; with several replicas, the sum of their states."""
        return self._client.stats

    @property
    def replicas(self) -> list[ReplicaState]:
        """Return the state of each engine core."""
        return self._client.states

    async def check_health(self) -> None:
        """Raise EngineDeadError when no core is left, EngineRestartingError while none is ready, and
        EngineUnresponsiveError when all that are ready are stopped or hung.

        A long step is neither. Returns within milliseconds, or in doubt within two seconds.
        """
        await self._client.check_health()

    def default_sampling_params(self, **explicit: Any) -> SamplingParams:
        """Return the model's sampling defaults, with `explicit` values over them."""
        return self.input.default_sampling_params(**explicit)

    def render_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> Prompt:
        """Return the prompt that a conversation becomes. Raises InvalidRequest."""
        return self.input.render_chat(messages, options)

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one request until the one with `finished`; a loop that is left early ends the request.

        A slow reader gets the results of several steps in one output. Raises InvalidRequest before the first output
        when the request is refused, EngineDeadError when the core dies.
        """
        request_ids = None if request_id is None else [request_id]
        outputs = self.generate_together([prompt], sampling_params, request_ids, RequestOptions.of_keywords(options))
        async with aclosing(outputs):
            async for _, output in outputs:
                yield output

    async def generate_together(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_ids: Sequence[str] | None = None,
        options: RequestOptions | None = None,
        direct: DirectReader | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the outputs of several requests with the same options, each with the index of its prompt.

        The core accepts all of them, or refuses all. Each has its own last output, as in `generate`. direct: takes
        outputs instead of the loop, all but the last ones, while the loop waits for them.
        """
        if request_ids is None:
            request_ids = [f"request-{uuid4().hex}" for _ in prompts]
        if options is not None and options.lora_request is not None:
            adapter = await self.resolved(options.lora_request)
            options = msgspec.structs.replace(options, lora_request=adapter)
        read = [Prompt.read(prompt) for prompt in prompts]
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        requests = await self._turns.requests(list(zip(request_ids, read, strict=True)), params, options)
        await self._aborted_ids.wait_until_free(request_ids)
        reader = Reader(direct)
        in_use = ExitStack()
        await self._open(requests, read, reader)
        if options is not None and options.lora_request is not None:
            in_use.enter_context(self.metrics.adapter_in_use(options.lora_request.lora_name, len(requests)))
        try:
            while reader.open:
                await reader.wait()
                for number, (index, output) in enumerate(reader.changed(), 1):
                    if output is not None:
                        yield index, output
                    if number % PROMPTS_OF_TURN == 0:
                        await asyncio.sleep(0)
                if reader.open and self._dead.done():
                    raise self._dead.result()
        finally:
            in_use.close()
            # the id of one that is finished, also by `abort`, may be another request's by now
            await self.abort([each.request_id for each in reader.open.values() if not each.finished])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; each reader gets a last output with finish reason "abort". Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        aborted = [each for each in request_ids if self._output.abort(each) is not None]
        if aborted and self._client.is_running:
            self._client.send(AbortRequests(aborted))
            self._aborted_ids.add(aborted)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop all cached prefixes and pins, as `LLMEngine.reset_prefix_cache` does. Returns False, without effect in
        the replica that refuses it, while requests have KV blocks or blocks are being moved."""
        return bool(await self.call("reset_prefix_cache", bool(reset_running_requests)))

    async def resolved(self, adapter: LoRARequest) -> LoRARequest:
        """Return an adapter with the digest of its files, which a thread reads if they have changed. Raises
        InvalidRequest."""
        if adapter.digest:
            return adapter
        return await asyncio.to_thread(self.input.resolved, adapter) or adapter

    async def read_adapter(self, adapter: LoRARequest) -> LoRARequest:
        """Let every core read an adapter, which checks that it fits the model, and return it with its digest. Raises
        InvalidRequest."""
        found = await self.resolved(adapter)
        while (error := await self.call("read_adapter", *msgspec.structs.astuple(found))) is None:
            await asyncio.sleep(_POLL_S)
        if error:
            raise InvalidRequest(f"the adapter {found.lora_name} cannot be used: {error}", field="lora_path")
        return found

    async def pin_prefix(
        self, prompt: PrefixLike, ttl_s: float, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> PinnedPrefix:
        """Keep a prefix in the cache for `ttl_s` seconds, as `LLM.pin_prefix` does. Raises InvalidRequest."""
        ttl_s = checked_ttl_s(ttl_s)
        token_ids, *key = await self._prefix(prompt, cache_salt, lora_request)
        return msgspec.convert(await self.call("pin_prefix", token_ids, ttl_s, *key), PinnedPrefix)

    async def unpin_prefix(
        self, prompt: PrefixLike, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> bool:
        """End the pin of exactly this prefix before its time. Returns False when there is none."""
        return bool(await self.call("unpin_prefix", *await self._prefix(prompt, cache_salt, lora_request)))

    async def is_paused(self) -> bool:
        """Return whether a pause holds requests back."""
        return bool(await self.call("is_paused"))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold all requests back until `resume_generation`; new ones wait. Returns when nothing runs any more.

        mode: "abort" ends open requests with the finish reason "abort", "wait" lets those that have begun end first,
        and "keep" lets them go on afterwards. clear_cache: forget cached prefixes and pins, and compute again what is
        kept; requests draw the same tokens either way. Raises InvalidRequest.
        """
        check_mode(mode)
        is_complete = await self.call("pause", mode, bool(clear_cache))
        while not is_complete:
            await asyncio.sleep(_POLL_S)
            is_complete = await self.call("pause_is_complete")

    async def resume_generation(self) -> None:
        """Let requests go on after `pause_generation`. Without a pause nothing happens."""
        await self.call("resume")

    async def is_sleeping(self) -> bool:
        """Return whether the engine has neither weights nor KV cache."""
        return bool(await self.call("is_sleeping"))

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give back memory, as `LLM.sleep` does, after a pause in this mode (`pause_generation`); level 0 is that pause
        alone. New requests wait until the engine wakes up. Raises InvalidRequest and RequestFailed."""
        check_level(level)
        check_mode(mode)
        pauses = level == 0 or (mode != "keep" and self.config.model.enable_sleep_mode)
        if pauses:
            await self.pause_generation(mode=mode, clear_cache=False)
        try:
            await self.call("sleep" if level else "is_sleeping")
        except RequestFailed:
            if pauses:
                await self.resume_generation()
            raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the weights again, as `LLM.wake_up` does. Raises RequestFailed."""
        check_tags(tags)
        await self.call("wake_up")

    async def update_weights_from_disk(self, model_path: str | Path) -> None:
        """Take other weights, as `LLM.update_weights_from_disk` does, in all replicas at once. Raises RequestFailed."""
        await asyncio.shield(self._updates.make(model_path, None))

    async def update_weights_from_tensor(self, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Take all weights, by their names in the checkpoint, as `LLM.update_weights_from_tensor` does, in all replicas
        at once. Raises ConfigError and RequestFailed."""
        folder = await asyncio.to_thread(WeightFolder, Path(self.config.model.path), named_tensors)
        await asyncio.shield(self._updates.make(folder.path, folder))

    async def get_weight_version(self) -> str:
        """Return the label of the weights in use. Raises RequestFailed where replicas have several."""
        return str(await self.call("get_weight_version"))

    async def update_weight_version(self, new_version: str) -> None:
        """Label the weights in use, as `LLM.update_weight_version` does, in all replicas. Raises InvalidRequest."""
        await self.call("set_weight_version", checked_version(new_version))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do what `update_weight_version` does, unless there is no label."""
        if weight_version is not None:
            await self.update_weight_version(weight_version)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a profile in all ranks, as `LLM.start_profile` does. Raises RequestFailed and InvalidRequest."""
        await self.call("profile", profile_name(profile_prefix))

    async def stop_profile(self) -> None:
        """End the profile, and write it. Raises RequestFailed."""
        await self.call("profile", None)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call to the core (`stats`, `reset_prefix_cache`, …), as built-in types."""
        return await self._client.call(method, *arguments)

    async def drain(self, replica: int = 0, *, stop: bool = False) -> int:
        """Move the open requests of a replica to others and start it again, or stop it; return their number. With a
        single replica they wait until it has been started again. Raises InvalidRequest."""
        return await self._client.drain(replica, stops=stop)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the last core is given up, or `shutdown` was called, and return the error with the reason."""
        return await asyncio.shield(self._dead)

    def begin_shutdown(self) -> None:
        """Tell the core process to end; open requests get EngineDeadError. Idempotent, also after the event loop."""
        self._receiver.cancel()
        self._die(EngineDeadError("the engine has been shut down"))
        self._client.begin_shutdown()

    async def shutdown(self) -> None:
        """End the core process; open requests get EngineDeadError. Bounded in time, and idempotent."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._die(EngineDeadError("the engine has been shut down"))
        await self._client.shutdown()
        await asyncio.gather(self._aborted_ids.close(), self._updates.close())

    async def _prefix(self, prompt: PrefixLike, salt: str | None, adapter: LoRARequest | None) -> tuple[Any, ...]:
        return await self._turns.prefix(prompt, salt, adapter and await self.resolved(adapter))

    async def _open(self, requests: Sequence[EngineCoreRequest], prompts: Sequence[Prompt], reader: Reader) -> None:
        if self._dead.done():
            raise self._dead.result()
        opened: list[OpenRequest] = []
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                opened.append(self._output.add(request, prompt.text))
                if len(opened) % PROMPTS_OF_TURN == 0:
                    await asyncio.sleep(0)
            if self._dead.done():
                raise self._dead.result()
            reader.watch(opened)
            self._client.send(AddRequests(list(requests)))
        except (EngineDeadError, EngineRestartingError, InvalidRequest, asyncio.CancelledError):
            for each in opened:
                self._output.abort(each.request_id)
            raise

    async def _receive(self) -> None:
        """Process outputs of the cores until the last one is given up."""
        try:
            await self._client.run(self._process, self._output.to_resume)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            _log.exception("the front failed")  # without an end, requests and calls would wait for ever
            self._die(EngineDeadError(f"the front failed ({type(error).__name__}: {error}); its log has more"))
            self._client.begin_shutdown()

    async def _process(self, replica: int, step: StepOutputs) -> None:
        self.metrics.observe_stats(step.stats, replica)
        for number, outputs in enumerate(in_turns(step.outputs)):
            if number:
                await asyncio.sleep(0)
            for stop in self._output.process(outputs).stops:
                self._client.send(stop)

    def _die(self, error: EngineDeadError) -> None:
        if not self._dead.done():
            self._dead.set_result(error)
        self._output.fail()
