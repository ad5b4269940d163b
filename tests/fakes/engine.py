"""Engine cores over the fake executor, and requests for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.config.schema import CacheConfig, SchedulerConfig
from octavo.core.cache_limits import LIVE_STATES, CacheLimits, GroupLimits
from octavo.core.messages import CoreReady, EngineCoreOutput, EngineCoreRequest
from octavo.core.outputs import RequestMetrics
from octavo.core.resume import ResumedSequence
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine_core import EngineCore
from octavo.engine.recorder import RecordedScheduler, Recorder
from octavo.engine.text.tokenizer import Tokenizer
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.connector import Connector
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.scheduler.drafts import Proposer
from octavo.scheduler.rates import PreemptionCosts
from tests.fakes.accounting import check_scheduler
from tests.fakes.executor import ENCODING, NUM_ENCODED, STATE, HashExecutor

_OTHERS = {STATE: LIVE_STATES, ENCODING: NUM_ENCODED}


class Clock:
    """Counts its readings. `time` is what the next one answers."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        now, self.time = self.time, self.time + 1.0
        return now


def make_settings(
    *,
    num_blocks: int | tuple[int, ...] = 64,
    block_size: int = 4,
    watermark: float = 0.0,
    enable_prefix_caching: bool = True,
    prefix_cache_eviction: str = "lru",
    prefix_cache_size: int | None = None,
    num_host_blocks: int = 0,
    state_snapshot_tokens: int = 16,
    costs: PreemptionCosts | None = None,
    sliding_window: int | tuple[int | None, ...] | None = None,
    policy: str = "fcfs",
    sends_tokens: bool = False,
    **scheduling: Any,
) -> SchedulerSettings:
    """A small scheduler; `scheduling` are fields of SchedulerConfig. `sliding_window`, and `num_blocks` too, may have a
    value for each cache group; a group with the window `STATE` keeps states, one with `ENCODING` what an
    encoder makes."""
    # the clock counts its readings: steps take no time that says anything, unless a test is about that
    values = {
        "target_step_ms": 0.0,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "preemption_mode": "recompute",
        "max_model_len": 512,
        "scheduling_policy": policy,
    }
    scheduler = SchedulerConfig(**(values | scheduling))  # type: ignore[arg-type]
    return SchedulerSettings(
        cache=CacheConfig(
            dtype="float32",
            block_size=block_size,
            watermark=watermark,
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache_eviction=prefix_cache_eviction,
            prefix_cache_size=prefix_cache_size,
            state_snapshot_tokens=state_snapshot_tokens,
        ),
        scheduler=scheduler,
        limits=CacheLimits(
            block_size=block_size,
            groups=tuple(
                GroupLimits(
                    num_blocks=num_blocks if isinstance(num_blocks, int) else num_blocks[index],
                    num_host_blocks=num_host_blocks,
                    block_bytes=10,
                    window=None if window in _OTHERS else window,
                    max_live_tokens=_OTHERS[window] if window in _OTHERS else scheduler.max_live_tokens(window),
                    is_state=window == STATE,
                    num_encoded=NUM_ENCODED if window == ENCODING else 0,
                )
                for index, window in enumerate(_each(sliding_window))
            ),
            num_lookahead=scheduler.num_lookahead_slots,
        ),
        preemption_costs=costs or PreemptionCosts(prefill_tokens_per_s=10.0, swap_bytes_per_s=8.0),
        sends_tokens=sends_tokens,
    )


def _each(sliding_window: int | tuple[int | None, ...] | None) -> tuple[int | None, ...]:
    return sliding_window if isinstance(sliding_window, tuple) else (sliding_window,)


def make_core(
    *, depth: int = 1, fail_token: int | None = None, swap_block_s: float = 0.0, record_to: Path | None = None,
    clock: Clock | None = None, sliding_window: int | tuple[int | None, ...] | None = None, keeps_unseen: bool = False,
    open_tokenizer: Callable[[], Tokenizer] | None = None, proposer: Proposer | None = None,
    sends_tokens: bool = False, compile_steps: int = 0, source: Connector | None = None,
    connect: Callable[[BlockManager], Connector] | None = None, **settings: Any,
) -> EngineCore:  # fmt: skip
    """A core over the hash executor; `settings` are those of `make_settings`. `keeps_unseen`: blocks that left the
    window are not released. `sends_tokens`: a second worker that never draws follows the first."""
    kept = sliding_window
    if keeps_unseen:
        kept = tuple(window if window in _OTHERS else None for window in _each(sliding_window))
    chosen = make_settings(sliding_window=kept, max_steps_in_flight=depth, sends_tokens=sends_tokens, **settings)
    block_size = chosen.cache.block_size
    make_executor = partial(
        HashExecutor,
        block_size,
        fail_token=fail_token,
        num_lookahead_slots=chosen.scheduler.num_lookahead_slots,
        swap_block_s=swap_block_s,
        compile_steps=compile_steps,
        windows=_each(sliding_window),
        max_num_batched_tokens=chosen.scheduler.max_num_batched_tokens,
    )
    executor = make_executor(follower=make_executor(draws=False) if sends_tokens else None)
    recorder = None
    if record_to is not None:
        recorder = Recorder(str(record_to), chosen, depth, proposer)
        proposer = recorder.proposer
    scheduler = build_scheduler(chosen, proposer, connect or (lambda *_: source))
    return EngineCore(
        executor,
        scheduler if recorder is None else RecordedScheduler.around(scheduler, recorder),
        CoreReady(cache=chosen.limits, max_model_len=512, vocab_size=50, plan=""),
        max_steps_in_flight=depth,
        clock=clock or Clock(),
        on_shutdown=None if recorder is None else recorder.close,
        open_tokenizer=open_tokenizer,
        can_sleep=True,
    )


def make_request(
    request_id: str, prompt: Iterable[int], *, end_token_ids: tuple[int, ...] = (), **params: object
) -> EngineCoreRequest:
    values: dict[str, object] = {"max_tokens": 8, "seed": 0} | params
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**values),  # type: ignore[arg-type]
        arrival_time=0.0,
        end_token_ids=end_token_ids,
    )


class Collected:
    """All outputs of a core by request: token ids and log-probabilities by sequence index, and how each one ended."""

    def __init__(self) -> None:
        self.token_ids: dict[str, dict[int, list[int]]] = {}
        self.logprobs: dict[str, dict[int, list[float]]] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.finish: dict[str, dict[int, tuple[str, int | None]]] = {}
        self.finals: dict[str, EngineCoreOutput] = {}

    def add(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.finals, f"{name} has an output after its final one"
            for delta in output.deltas:
                assert delta.index not in self.finish.get(name, {}), "a finished sequence goes on"
                self.token_ids.setdefault(name, {}).setdefault(delta.index, []).extend(delta.token_ids)
                logprobs = [token.logprob for token in delta.logprobs]
                self.logprobs.setdefault(name, {}).setdefault(delta.index, []).extend(logprobs)
                if delta.finish_reason is not None:
                    self.finish.setdefault(name, {})[delta.index] = (delta.finish_reason, delta.stop_reason)
            if output.prompt_logprobs is not None:
                have = self.prompt_logprobs.setdefault(name, [])
                assert output.prompt_logprobs.first_position == len(have) + 1
                have.extend(token.logprob for token in output.prompt_logprobs.tokens)
            if output.finished:
                self.finals[name] = output

    def to_resume(
        self, request: EngineCoreRequest, metrics: RequestMetrics | None = None, stopped: Collection[int] = ()
    ) -> EngineCoreRequest:
        """The request as it goes on in another core behind what has come so far. `stopped`: sequences that the front
        has ended."""
        name = request.request_id
        by_index = self.token_ids.get(name, {})
        ends = self.finish.get(name, {}) | dict.fromkeys(stopped, ("stop", None))
        if not by_index:
            self.prompt_logprobs.pop(name, None)  # they come again, all of them
        sequences = tuple(
            ResumedSequence(
                index=index,
                token_ids=list(token_ids),
                finish_reason=ends[index][0] if index in ends else None,
                stop_reason=ends[index][1] if index in ends else None,
            )
            for index, token_ids in sorted(by_index.items())
        )
        return msgspec.structs.replace(request, resumed=sequences, metrics=metrics)


def run(
    core: EngineCore,
    requests: Iterable[EngineCoreRequest] = (),
    max_steps: int = 10_000,
    collected: Collected | None = None,
) -> Collected:
    """Add the requests, step until all have ended, and prove the accounting. Goes on with `collected`."""
    collected = collected or Collected()
    for request in requests:
        core.add_request(request)
    for _ in range(max_steps):
        if not core.has_unfinished():
            break
        collected.add(core.step().outputs)
        check_scheduler(core.scheduler)
    assert not core.has_unfinished(), "requests are left after many steps"
    manager = core.scheduler.block_manager
    assert manager.num_used_blocks == manager.pins.num_blocks, "more is used than what is pinned"
    assert core.scheduler.block_manager.num_used_host_blocks == 0
    return collected


def run_alone(
    request: EngineCoreRequest,
    sliding_window: int | tuple[int | None, ...] | None = None,
    fail_token: int | None = None,
) -> Collected:
    """What the request gives by itself: a roomy core, no prefix cache, one step at a time, every block kept, nothing
    refused."""
    alone = copy(request)
    alone.first_token_deadline_s = None
    core = make_core(
        num_blocks=512,
        max_num_seqs=64,
        enable_prefix_caching=False,
        sliding_window=sliding_window,
        keeps_unseen=True,
        fail_token=fail_token,
    )
    return run(core, [alone])
