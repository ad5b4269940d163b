"""An engine without a model: it answers with the letters of a fixed sentence, one token per character.

It keeps the promises of AsyncLLM that the server builds on: refusals before the first output, deltas, an abort when its
iterator is closed, errors when the core dies.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import repeat
from typing import Any, cast

import msgspec
import pytest

from octavo.async_llm import AsyncLLM
from octavo.config.schema import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    PoolingConfig,
    SchedulerConfig,
)
from octavo.core.adapter import LoRARequest
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import CoreReady, Decision, RequestTimeline, SchedulerStats
from octavo.core.outputs import (
    CompletionOutput,
    Logprob,
    PinnedPrefix,
    RequestError,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)
from octavo.core.pooling import PoolingParams
from octavo.core.prompt import Prompt
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.adapter_files import AdapterFiles
from octavo.engine.cores.replica import ReplicaState
from octavo.engine.input.vector_input import VectorInput, pair_of
from octavo.engine.output.metrics import Metrics
from octavo.engine.output.readers import DirectReader
from octavo.engine.sleep import check_level, check_tags
from octavo.engine.text.chat_template import ChatOptions
from octavo.engine.text.template_budget import RenderLimits
from octavo.errors import ContextTooLong, EngineDeadError, InvalidRequest, RequestFailed, RequestTooLarge, of_prompt
from octavo.server.decode import decode
from octavo.server.preparing import Preparer, TextPolicy
from octavo.server.sending import OpenRequests
from octavo.server.speech.sounds import HEAR, hear
from octavo.server.text_pool import TextPool
from octavo.server.texts import Texts

SENTENCE = "Blocks are pages — naïve ones. "
BOS = 0
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 256


class LetterTokenizer:
    """Characters are tokens; 0 starts a text."""

    joins_bytes = True
    special_ids = frozenset({BOS})
    added_tokens = {BOS: "<s>"}
    special_tokens = {"bos_token": "<s>"}

    def encode(self, text: str, add_special_tokens: bool = True, cuts: Sequence[int] = ()) -> list[int]:
        return [BOS] * add_special_tokens + [min(ord(letter), VOCAB_SIZE - 1) for letter in text]

    def encode_whole(
        self, texts: Sequence[str], most: int | None, add_special: bool = True, side: str = "right"
    ) -> tuple[list[int], int]:
        ids = [token_id for text in texts for token_id in self.encode(text, add_special)]
        cut = len(ids) - (len(ids) if most is None else min(most, len(ids)))
        return ids[cut:] if side == "left" else ids[: len(ids) - cut], len(texts[0]) + 1 if len(texts) > 1 else 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.token_text(token_id) for token_id in token_ids if token_id or not skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == BOS else chr(token_id)

    def first_text(self, token_id: int, skip_special_tokens: bool = True) -> str:
        return self.decode([token_id], skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def has_id(self, token_id: int) -> bool:
        return token_id < VOCAB_SIZE

    def token_id(self, token: str | None) -> int | None:
        return BOS if token == "<s>" else None


class InlineTexts(Texts):
    """Reads every request of a fake in this process: no other one could do its work."""

    @classmethod
    def of(cls, llm: AsyncLLM, policy: TextPolicy, open_requests: OpenRequests) -> Texts:
        return cls(Preparer(llm.input, policy), cast(TextPool, InlinePool(llm)), open_requests)

    async def _here(self, pieces: Sequence[bytes], kind: Any, most_bytes: int, make: Callable[..., Any]) -> Any:
        async with self._turn:
            asked = decode(b"".join(pieces), kind)
            return asked, make(asked)


class InlinePool:
    """Hears sounds in a thread."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def run(self, kind: str, pieces: Sequence[bytes], sender: str = "") -> bytes:
        assert kind.startswith(HEAR), "all else is read in this process"
        job = kind.removeprefix(HEAR), b"".join(pieces)
        return await asyncio.to_thread(hear, *job, self._llm.config.model, self._llm.input)


@pytest.fixture(scope="session", autouse=True)
def fakes_read_texts_inline() -> Iterator[None]:
    """A server of a fake has `InlineTexts`; others have what they have."""
    of = Texts.of

    def chosen(llm: AsyncLLM, *others: Any) -> Texts:
        return InlineTexts.of(llm, *others) if isinstance(llm, FakeAsyncLLM) else of(llm, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Texts, "of", chosen)
        yield


class FakeAsyncLLM:
    """Answers each sequence with SENTENCE, again and again, up to max_tokens (31 when there is no limit).

    error_after: this many tokens, then `error` (raised, or in the output when it is a RequestError).
    hold_after: this many tokens, then nothing for ever. token_interval_s: pause between tokens.
    num_beams: most beams that a search finds. finish_reason: of all sequences, instead of the usual ones.
    Records the requests it was given, and the ids of those that were closed before their end.
    """

    def __init__(self, model_names: tuple[str, ...] = ("letters", "alias"), lora: LoRAConfig | None = None) -> None:
        self.tokenizer = LetterTokenizer()
        self.input = self.media = self  # it is its own input processor
        self.config = EngineConfig(
            model=ModelConfig(
                model="letters",
                path="/nowhere",
                tokenizer_path="/nowhere",
                served_model_names=model_names,
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB_SIZE,
            ),
            cache=CacheConfig(dtype="float32"),
            scheduler=SchedulerConfig(max_model_len=MAX_MODEL_LEN),
            device=DeviceConfig(threads=1),
            lora=lora or LoRAConfig(),
        )
        self.ready = CoreReady(
            cache=CacheLimits.of_one_group(64, 16), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, plan=""
        )
        self.stats = SchedulerStats(num_blocks=64)
        self.metrics = Metrics("letters")
        self.adapter_files = AdapterFiles()
        self.requests: list[tuple[str, Prompt, SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.num_outputs = 0
        self.reset()
        self._dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()

    def reset(self) -> None:
        """Back to plain answers, and forget what was asked."""
        self.error: Exception | RequestError | None = None
        self.error_after = self.hold_after = 10**9
        self.token_interval_s = 0.0
        self.endless = False
        self.sentence = SENTENCE
        self.finish_reason: str | None = None
        self.max_prompt_len = MAX_MODEL_LEN
        self.num_beams = 1000
        self.reads_images = True
        self.sounds = self.hearing = None
        self.pooling: PoolingConfig | None = None
        self.fault: Exception | None = None
        self.adapter_error: str | None = None
        self.holds_adapters = False
        self.is_busy = self.sleeps = self.profiles = False
        self.paused: tuple[str, bool] | None = None
        self.weights: str | None = None
        self.version = "default"
        self.ended: list[str] = []
        self.pinned: list[tuple[Prompt, float, str | None]] = []
        self.requests.clear()
        self.aborted.clear()
        self.num_outputs = 0
        self.metrics_of_request = RequestMetrics(arrival_time=0.0)

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        return {"tokenizer_class": "Letters", "chat_template": "{{ messages }}"}

    @property
    def is_running(self) -> bool:
        return not self._dead.done()

    @property
    def replicas(self) -> list[ReplicaState]:
        held = {"num_paused": int(self.paused is not None), "num_sleeping": int(self.sleeps)}
        return [ReplicaState(0, None, "ready", msgspec.structs.replace(self.stats, **held))]

    async def check_health(self) -> None:
        if self.fault is not None:
            raise self.fault
        if not self.is_running:
            raise self._dead.result()

    def die(self, message: str) -> None:
        """What the end of the core process does."""
        self._dead.set_result(EngineDeadError(message))

    async def drain(self, replica: int = 0, *, stop: bool = False) -> int:
        if replica != 0:
            raise InvalidRequest(f"replica is {replica}, must be one that is ready: 0", field="replica")
        return 7 + stop

    async def wait_dead(self) -> EngineDeadError:
        return await asyncio.shield(self._dead)

    async def shutdown(self) -> None:
        if self.is_running:
            self.die("shut down")

    def default_sampling_params(self, **explicit: Any) -> SamplingParams:
        return SamplingParams.over_defaults({"top_k": 7} | self.config.model.generation_defaults, explicit)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        options: ChatOptions,
        limits: RenderLimits | None = None,
    ) -> Prompt:
        if options.add_generation_prompt and options.continue_final_message:
            raise InvalidRequest("one of the two", field="continue_final_message")
        end = "" if options.continue_final_message else "\n"
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        text = (options.chat_template or "") + "\n".join(lines) + end
        return Prompt(text=text + "assistant: " * options.add_generation_prompt, add_special_tokens=False)

    async def call(self, method: str, *arguments: Any) -> Any:
        request_id = f"cmpl-x-0-{'ab' * 6}"
        if method == "decisions":
            decision = Decision(
                step=1, last_step=4, time=0.5, kind="blocked", request_id=request_id, because="no blocks"
            )
            return [msgspec.to_builtins(decision)]
        if method == "live":
            raise EngineDeadError("it makes no reports")
        assert method == "timelines"
        timeline = RequestTimeline(
            request_id=request_id,
            num_prompt_tokens=5,
            num_cached_tokens=4,
            num_generated_tokens=3,
            num_preemptions=0,
            events=[(0.5, "queued"), (0.75, "finished")],
        )
        return [msgspec.to_builtins(timeline)]

    async def resolved(self, adapter: LoRARequest) -> LoRARequest:
        return await asyncio.to_thread(self.adapter_files.resolve, adapter)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.ended += request_ids

    async def read_adapter(self, adapter: LoRARequest) -> LoRARequest:
        if self.adapter_error is not None:
            raise InvalidRequest(self.adapter_error, field="lora_path")
        if self.sleeps:
            raise RequestFailed("the engine sleeps; wake it up first")
        while self.holds_adapters:
            await asyncio.sleep(0.001)
        return await self.resolved(adapter)

    async def pin_prefix(
        self, prompt: Prompt, ttl_s: float, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> PinnedPrefix:
        """All but the last token are kept, and half of those are cached."""
        num_tokens = len(self._prefix(prompt)) - 1
        if ttl_s <= 0:
            raise InvalidRequest(f"ttl_s is {ttl_s}, must be above 0", field="ttl_s")
        self.pinned.append((prompt, ttl_s, cache_salt))
        return PinnedPrefix(num_tokens=num_tokens, num_cached_tokens=num_tokens // 2, because="all but the last")

    async def unpin_prefix(
        self, prompt: Prompt, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> bool:
        self._prefix(prompt)
        left = [pin for pin in self.pinned if (pin[0], pin[2]) != (prompt, cache_salt)]
        was_pinned, self.pinned = len(left) < len(self.pinned), left
        return was_pinned

    async def is_paused(self) -> bool:
        return self.paused is not None

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = mode, clear_cache

    async def resume_generation(self) -> None:
        self.paused = None

    async def is_sleeping(self) -> bool:
        return self.sleeps

    async def sleep(self, level: int = 1, mode: str = "keep") -> None:
        check_level(level)
        self.sleeps, self.paused = level > 0, None if level else (mode, False)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        check_tags(tags)
        self.sleeps, self.paused = False, None

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        if "/" in (profile_prefix or ""):
            raise InvalidRequest("profile_prefix has a slash", field="profile_prefix")
        if self.profiles:
            raise RequestFailed("a profile runs already, for /traces/a; end it with stop_profile")
        self.profiles = True

    async def stop_profile(self) -> None:
        self.profiles = False

    async def update_weights_from_disk(self, model_path: str) -> None:
        if model_path == "/nowhere":
            raise RequestFailed("/nowhere: does not exist")
        self.weights, self.sleeps = model_path, False

    async def get_weight_version(self) -> str:
        return self.version

    async def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.version = weight_version or self.version

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.pinned.clear()
        return reset_running_requests or not self.is_busy

    def _prefix(self, prompt: Prompt) -> list[int]:
        return self._accept(prompt, SamplingParams())

    async def generate_together(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request_ids: Sequence[str],
        options: RequestOptions,
        direct: DirectReader | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        each = zip(prompts, repeat(params), request_ids, strict=False)
        streams = [self.generate(*one, **msgspec.structs.asdict(options)) for one in each]
        if len(prompts) > 1:
            streams = [_of_prompt(*one) for one in enumerate(streams)]
        async with aclosing(merge(streams)) as outputs:
            async for index, output in outputs:
                if direct is not None and not output.finished and direct.can_take():
                    direct.take(index, output)
                else:
                    yield index, output

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str = "request", **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if isinstance(params, PoolingParams):
            yield self._pooled(prompt, params, request_id, options)
            return
        self.vectors.refuse_text()
        prompt_ids = self._accept(prompt, params)
        self.requests.append((request_id, prompt, params, options))
        budget = params.max_tokens if params.max_tokens is not None else len(self.sentence)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            tops = [self._position(token_id, params.prompt_logprobs) for token_id in prompt_ids[1:]]
            prompt_logprobs = [None, *tops]
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt_ids,
            outputs=[],
            finished=False,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=len(prompt_ids) // 2,
            num_fetched_tokens=1,
            cache_miss_reason="the next block is new" if len(prompt_ids) > 3 else None,
            metrics=self.metrics_of_request,
        )
        ended = False
        try:
            async for step, last in self._steps(budget):
                num_found = min(params.n, self.num_beams) if params.use_beam_search else params.n
                deltas = [self._delta(index, step, last, params) for index in range(num_found)]
                output.num_generated_tokens += len(deltas) if params.use_beam_search else params.width
                if params.output_kind is OutputKind.DELTA:
                    yield msgspec.structs.replace(output, outputs=deltas, finished=last)
                    self.num_outputs += 1
                    output.prompt_logprobs = None
                    continue
                output.outputs = [
                    self._joined(*pair) for pair in zip(output.outputs or [None] * num_found, deltas, strict=True)
                ]
                if last:
                    output.finished = True
                    yield output
            ended = True
        except RequestEndedError as error:
            ended = True
            yield msgspec.structs.replace(output, finished=True, error=error.error)
        except EngineDeadError:
            ended = True
            raise
        finally:
            if not ended and not output.finished:
                self.aborted.append(request_id)

    def _pooled(self, prompt: Prompt, params: PoolingParams, request_id: str, options: Any) -> RequestOutput:
        """A vector of the numbers of the tokens, or the share of letters of the first text in the second."""
        prompt = Prompt.read(prompt)
        token_ids, pooled = self.vectors.read(prompt, params)
        self.requests.append((request_id, prompt, params, options))
        values = [float(each) for each in token_ids]
        if pooled.params.task == "classify":
            shared = len(set(prompt.text or "") & set(prompt.second or prompt.text or ""))
            values = [shared / 10, *(0.125 for _ in self.pooling.labels[1:])] if self.pooling else []
        values = values[: params.dimensions]
        output = RequestOutput(
            request_id=request_id, prompt=prompt.text, prompt_token_ids=token_ids, outputs=[], finished=True
        )
        failed = isinstance(self.error, RequestError)
        return msgspec.structs.replace(
            output, pooled=array("f", values).tobytes(), error=self.error if failed else None
        )

    @property
    def vectors(self) -> VectorInput:
        return VectorInput(self.pooling, self.tokenizer, self.ready)  # type: ignore[arg-type]

    def check_text_length(self, text: str, field: str) -> None:
        if len(text) > 100 * MAX_MODEL_LEN:
            raise ContextTooLong("more characters than tokens can stand for", field=field)

    def pair_prompt(self, query: str, document: str, instruct: str | None = None) -> Prompt:
        return pair_of(self.vectors, None, query, document, instruct)

    def _accept(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        if not self.is_running:
            raise self._dead.result()
        token_ids = prompt.token_ids
        if token_ids is None:
            token_ids = self.tokenizer.encode(prompt.text or "", prompt.add_special_tokens)
        if not token_ids or token_ids == [BOS]:
            raise InvalidRequest("the prompt is empty", field="prompt", code="empty_prompt")
        if any(token_id >= VOCAB_SIZE for token_id in token_ids):
            raise InvalidRequest("prompt_token_ids has ids outside the vocabulary", field="prompt_token_ids")
        if len(token_ids) + (params.max_tokens or 1) > self.max_prompt_len:
            raise ContextTooLong(f"more than {MAX_MODEL_LEN} tokens", field="max_tokens")
        if params.n > 8:
            raise RequestTooLarge(f"n is {params.n}, must be at most 8", field="n")
        return list(token_ids)

    async def _steps(self, budget: int) -> AsyncGenerator[tuple[int, bool], None]:
        step = 0
        while step < budget or self.endless:
            if step >= self.hold_after:
                dead = await self.wait_dead()
                raise dead
            if step >= self.error_after and self.error is not None:
                raise RequestEndedError(self.error) if isinstance(self.error, RequestError) else self.error
            await asyncio.sleep(self.token_interval_s)
            if not self.is_running:
                raise self._dead.result()
            step += 1
            yield step - 1, step == budget and not self.endless

    def _delta(self, index: int, step: int, last: bool, params: SamplingParams) -> CompletionOutput:
        letter = self.sentence[step % len(self.sentence)]
        token_id = ord(letter) if ord(letter) < VOCAB_SIZE else VOCAB_SIZE - 1
        return CompletionOutput(
            index=index,
            text="" if token_id == BOS and params.skip_special_tokens else letter,
            token_ids=[token_id],
            logprobs=None if params.logprobs is None else [self._described(token_id, params)],
            text_offsets=None if params.logprobs is None else [step],
            finish_reason=self.finish_reason or ("length" if self.sentence == SENTENCE else "stop") if last else None,
            weight_versions=[WeightVersionSpan(self.version, 0, step + 1)] if last else None,
        )

    def _joined(self, whole: CompletionOutput | None, delta: CompletionOutput) -> CompletionOutput:
        if whole is None:
            return delta
        whole.text += delta.text
        whole.token_ids += delta.token_ids
        if whole.logprobs is not None and delta.logprobs is not None:
            whole.logprobs += delta.logprobs
        if whole.text_offsets is not None and delta.text_offsets is not None:
            whole.text_offsets += delta.text_offsets
        whole.finish_reason, whole.weight_versions = delta.finish_reason, delta.weight_versions
        return whole

    def _described(self, token_id: int, params: SamplingParams) -> dict[int, Logprob]:
        """Named tokens are as likely as their ids are small."""
        position = self._position(token_id, params.logprobs or 0)
        if params.logprob_token_ids is None:
            return position
        named = {
            each: Logprob(-float(each), None, self.tokenizer.token_text(each)) for each in params.logprob_token_ids
        }
        return named | {token_id: position[token_id]}

    def _position(self, token_id: int, num_top: int) -> dict[int, Logprob]:
        """The drawn token is the second likeliest; with `num_top` below 2 it comes on top of the likeliest."""
        others = [token_id + offset for offset in (1, 2, 3, 4, 5)][:num_top]
        ranked = [*others[:1], token_id, *others[1:]]
        entries = {
            other: Logprob(-math.log(2) * rank, rank, self.tokenizer.token_text(other))
            for rank, other in enumerate(ranked, 1)
        }
        return {other: logprob for other, logprob in entries.items() if logprob.rank <= num_top or other == token_id}


async def _of_prompt(index: int, stream: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(stream):
        with of_prompt(index):
            async for output in stream:
                yield output


async def merge(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams with the index of their stream, as they come."""
    arrived: asyncio.Queue[tuple[int, asyncio.Future[RequestOutput]]] = asyncio.Queue()
    awaited: dict[int, asyncio.Future[RequestOutput]] = {}

    def ask(index: int) -> None:
        awaited[index] = future = asyncio.ensure_future(anext(streams[index]))
        future.add_done_callback(lambda future: arrived.put_nowait((index, future)))

    for index in range(len(streams)):
        ask(index)
    try:
        while awaited:
            index, future = await arrived.get()
            del awaited[index]
            try:
                output = future.result()
            except StopAsyncIteration:
                continue
            yield index, output
            # asked for only now, so that each stream waits its turn and is read no further than its reader
            ask(index)
    finally:
        for future in awaited.values():
            future.cancel()
        await asyncio.gather(*awaited.values(), return_exceptions=True)
        for stream in streams:
            await stream.aclose()


class RequestEndedError(Exception):
    """Carries an error of one request to its output."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error
