"""Engine cores over the fake executor, and requests for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.config.schema import PreemptionMode, SchedulerConfig
from octavo.core.messages import CoreReady, EngineCoreOutput, EngineCoreRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine_core import EngineCore
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policies import make_policy
from octavo.scheduler.rates import PreemptionCosts, Rates
from octavo.scheduler.scheduler import Scheduler
from tests.fakes.executor import HashExecutor


def make_core(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    watermark: float = 0.0,
    enable_prefix_caching: bool = True,
    depth: int = 1,
    fail_token: int | None = None,
    num_host_blocks: int = 0,
    preemption_mode: PreemptionMode = "recompute",
    num_lookahead_slots: int = 0,
    policy: str = "fcfs",
    costs: PreemptionCosts | None = None,
    sliding_window: int | None = None,
    keeps_unseen: bool = False,
    **scheduling: Any,
) -> EngineCore:
    """A core whose clock counts its readings. `keeps_unseen`: blocks that left the window are not released."""
    names = SchedulerConfig.__struct_fields__
    config = SchedulerConfig(
        max_model_len=512,
        policy=policy,
        max_num_batched_tokens=max_num_batched_tokens,
        max_steps_in_flight=depth,
        num_lookahead_slots=num_lookahead_slots,
        **{name: scheduling.pop(name) for name in list(scheduling) if name in names},
    )
    block_manager = BlockManager(
        num_blocks,
        block_size,
        watermark,
        enable_prefix_caching,
        num_host_blocks,
        sliding_window=None if keeps_unseen else sliding_window,
        max_live_tokens=None if keeps_unseen else config.max_live_tokens(sliding_window),
    )
    costs = costs or PreemptionCosts(prefill_tokens_per_s=10.0, swap_bytes_per_s=8.0, block_bytes=10)
    rates = Rates(costs, config.prefill_tokens_per_s)
    scheduler = Scheduler(
        block_manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption_mode=preemption_mode,
        rates=rates,
        num_lookahead_slots=num_lookahead_slots,
        policy=make_policy(config, block_manager, rates),
        enable_chunked_prefill=config.enable_chunked_prefill,
        delay_factor=config.delay_factor,
        max_loras=config.max_loras,
        max_bypasses=config.max_bypasses,
        **scheduling,
    )
    ready = CoreReady(num_blocks=num_blocks, block_size=block_size, max_model_len=512, vocab_size=50, plan="")
    readings = iter(range(10**9))
    return EngineCore(
        HashExecutor(
            block_size,
            fail_token=fail_token,
            sliding_window=sliding_window,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        scheduler,
        ready,
        max_steps_in_flight=depth,
        clock=lambda: float(next(readings)),
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
        core.scheduler.check()
    assert not core.has_unfinished(), "requests are left after many steps"
    assert core.scheduler.block_manager.pool.num_used_blocks == 0
    assert core.scheduler.block_manager.host_pool.num_used_blocks == 0
    return collected


def run_alone(request: EngineCoreRequest, sliding_window: int | None = None) -> Collected:
    """What the request gives by itself: a roomy core, no prefix cache, one step at a time, every block kept."""
    core = make_core(
        num_blocks=512, max_num_seqs=64, enable_prefix_caching=False, sliding_window=sliding_window, keeps_unseen=True
    )
    return run(core, [request])
