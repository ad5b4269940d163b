"""A core that says what it is told to, so that the front can be tested by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.core.cache_limits import CacheLimits
from octavo.core.messages import (
    CoreReady,
    EngineCoreOutput,
    EngineCoreRequest,
    SchedulerStats,
    SequenceDelta,
    StepOutputs,
)
from octavo.core.outputs import RequestError
from octavo.core.step import TokenLogprobs
from octavo.engine.sleep import Sleep
from octavo.errors import ConfigError, OctavoError
from octavo.executor.executor import Executor

VOCAB_SIZE = 260


def echo(request: EngineCoreRequest, index: int) -> list[int]:
    """The reply of sequence `index`: the prompt without special tokens, then the end token."""
    return [token_id for token_id in request.prompt_token_ids if token_id < 256] + list(request.end_token_ids[:1])


def core_ready(**changes: Any) -> CoreReady:
    limits = {name: changes.pop(name) for name in ("num_blocks", "block_size") if name in changes}
    cache = CacheLimits.of_one_group(**({"num_blocks": 64, "block_size": 16} | limits))
    values = {"cache": cache, "max_model_len": 256, "vocab_size": VOCAB_SIZE, "plan": "the plan"}
    return CoreReady(**(values | changes))


def engine_config(tokenizer_path: str = "", *, max_num_seqs: int = 16, **model: Any) -> EngineConfig:
    values = {
        "model": "fake",
        "path": tokenizer_path,
        "tokenizer_path": tokenizer_path,
        "served_model_names": ("fake",),
        "dtype": "float32",
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
    }
    return EngineConfig(
        model=ModelConfig(**(values | model)),
        cache=CacheConfig(dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=256),
        device=DeviceConfig(threads=1),
    )


@dataclass
class ScriptedCore:
    """Each step adds `tokens_per_step` tokens of its reply to every sequence that runs.

    reply: the tokens of a sequence. late_tokens: it goes on for so many tokens after `stop_sequence`, as a core does
    that has planned ahead. fail_at_step: this step raises. Everything it is told is kept in `requests`, `aborted` and
    `stopped`.
    """

    reply: Callable[[EngineCoreRequest, int], Iterable[int]] = echo
    ready: CoreReady = field(default_factory=core_ready)
    tokens_per_step: int = 1
    late_tokens: int = 0
    fail_at_step: int | None = None
    error: OctavoError | RuntimeError = field(default_factory=lambda: RuntimeError("the fake core fails"))
    requests: dict[str, EngineCoreRequest] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    num_steps: int = 0
    num_generated_tokens: int = 0
    is_shut_down: bool = False
    is_waiting: bool = False

    def __post_init__(self) -> None:
        self.sleep = Sleep(cast("Executor", self), lambda _: None, is_allowed=False)
        self.is_still = False
        self._running: dict[str, dict[int, _Reply]] = {}
        self._num_left: dict[tuple[str, int], int] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests[request.request_id] = request
        replies = {index: _Reply(self.reply(request, index)) for index in range(request.params.width)}
        self._running[request.request_id] = replies

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def drop_requests(self) -> int:
        request_ids = list(self._running)
        self.abort_requests(request_ids)
        return len(request_ids)

    def stop_sequence(self, request_id: str, index: int) -> None:
        self.stopped.append((request_id, index))
        self._num_left[request_id, index] = self.late_tokens
        self._drop_stopped()

    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self) -> StepOutputs:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise self.error
        outputs = [self._advance(request_id) for request_id in list(self._running)]
        self._drop_stopped()
        return StepOutputs(outputs=outputs, stats=self.stats())

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running), num_steps=self.num_steps, num_generated_tokens=self.num_generated_tokens
        )

    def longest_step_s(self) -> float:
        return 0.0

    def call(self, method: str, *arguments: Any) -> Any:
        if method != "reset_prefix_cache":
            raise ConfigError(f"{method} is not a control call; there are ['reset_prefix_cache']")
        return not self._running

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _advance(self, request_id: str) -> EngineCoreOutput:
        request, sequences = self.requests[request_id], self._running[request_id]
        deltas = [self._delta(request, index, sequences[index]) for index in sorted(sequences)]
        for delta in deltas:
            if delta.finish_reason is not None:
                del sequences[delta.index]
        if not sequences:
            del self._running[request_id]
        return EngineCoreOutput(request_id=request_id, deltas=deltas, finished=not sequences, num_cached_tokens=3)

    def _delta(self, request: EngineCoreRequest, index: int, reply: _Reply) -> SequenceDelta:
        delta = SequenceDelta(index=index, token_ids=[], logprobs=[])
        params = request.params
        for _ in range(self.tokens_per_step):
            token_id = reply.take()
            delta.token_ids.append(token_id)
            delta.logprobs.append(token_logprobs(token_id, params.logprobs or 0))
            self.num_generated_tokens += 1
            if token_id in request.end_token_ids or token_id in params.stop_token_ids:
                delta.finish_reason = "stop"
                delta.stop_reason = None if token_id in request.end_token_ids else token_id
            elif reply.is_over or reply.num_taken == params.max_tokens:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                break
        return delta

    def _drop_stopped(self) -> None:
        for (request_id, index), num_left in list(self._num_left.items()):
            self._num_left[request_id, index] = num_left - self.tokens_per_step
            if num_left > 0:
                continue
            del self._num_left[request_id, index]
            sequences = self._running.get(request_id, {})
            sequences.pop(index, None)
            if not sequences:
                self._running.pop(request_id, None)


class _Reply:
    """Tokens that may go on for ever."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._token_ids = iter(token_ids)
        self._next = next(self._token_ids, None)
        self.num_taken = 0

    @property
    def is_over(self) -> bool:
        return self._next is None

    def take(self) -> int:
        token_id, self._next = self._next, next(self._token_ids, None)
        self.num_taken += 1
        assert token_id is not None
        return token_id


def endless(request: EngineCoreRequest, index: int) -> Iterable[int]:
    """A reply that never ends."""
    return itertools.repeat(ord("a"))


def token_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability -0.5, the second likeliest behind the byte "a", and then the bytes after it."""
    top_ids = (ord("a"), token_id, *range(ord("b"), ord("z")))[:num_top]
    return TokenLogprobs(
        token_id=token_id,
        logprob=-0.5,
        rank=2,
        top_ids=top_ids,
        top_logprobs=tuple(-0.1 * (number + 1) for number in range(num_top)),
    )


class RefusingCore(ScriptedCore):
    """Ends every request with an error."""

    def __init__(self, error: RequestError) -> None:
        super().__init__()
        self._error = error

    def _advance(self, request_id: str) -> EngineCoreOutput:
        del self._running[request_id]
        return EngineCoreOutput(request_id=request_id, deltas=[], finished=True, error=self._error)
