"""Reads from a recording its requests as a trace, its steps as a cost model, and its settings as arguments.

With them the same requests can be simulated under other settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from octavo.config.args import CacheArgs
from octavo.config.fields import values_of
from octavo.config.scheduler_args import SchedulerArgs
from octavo.core.messages import AbortRequests, AddRequests, EngineCoreOutput, EngineCoreRequest, StopSequence
from octavo.core.outputs import RequestMetrics
from octavo.core.step import SchedulerOutput
from octavo.engine.recorder import Planned, PrefixCacheReset, Updated
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cost_model import COPIED_BLOCK, FEATURES, Fitted, MeasuredStep, StepWork, fit, work_of
from octavo.simulate.executor import TokenGaps
from octavo.simulate.outcome import Outcome, RequestRecord, Totals
from octavo.simulate.replay import Replay, ReplayedStep
from octavo.simulate.traces import TraceRequest

_GIB: Final = 1 << 30
_PROMPT_LEN: Final = 512
"""Length of the prompt whose rate is used as the rate of prefills."""


class Recorded(NamedTuple):
    """The contents of a recording. requests: those that produced a token, with their recorded lengths. num_left_out:
    number of the others, which were refused or aborted before. steps: their work and time, including what the engine
    did until the next step. outcome: of the requests, without samples. swap_bytes_per_s: as measured; None when nothing
    was swapped.
    """

    settings: SchedulerSettings
    requests: list[TraceRequest]
    num_left_out: int
    steps: list[MeasuredStep]
    outcome: Outcome
    swap_bytes_per_s: float | None


def read_recorded(path: str | Path, progress: Callable[[float], None] | None = None) -> Recorded:
    """Return the contents of a recording. Raises ConfigError for a file that is no recording, or whose steps this
    version plans differently.
    """
    replay = Replay(path, progress)
    settings, groups = replay.settings, replay.scheduler.groups
    seen: dict[str, _Seen] = {}
    clock, gaps = _StepClock(settings.limits.window), TokenGaps()
    swap_s, num_resets = 0.0, 0
    for event, result in replay.events():
        match event:
            case AddRequests(added):
                for request in added:
                    resumed = {each.index: list(each.token_ids) for each in request.resumed}
                    seen[request.request_id] = _Seen(request, num_resets, resumed)
            case PrefixCacheReset() if result:
                num_resets += 1
                for request_id in groups:
                    seen[request_id].num_resets = num_resets
            case Planned(now):
                clock.planned(now, _step_of(result, path))
            case AbortRequests() | StopSequence():
                if not groups:
                    clock.idle()
            case Updated(now, output):
                clock.updated(now, is_busy=bool(groups))
                swap_s += output.swap_s
                gaps.note([row.seq_id for row in output.rows if row.tokens], now)
                assert isinstance(result, list), "an update returns outputs"
                for each in result:
                    seen[each.request_id].add(each, now)
    served = [each for each in seen.values() if each.tokens]
    if not served:
        raise ConfigError(f"{path} has no request that produced a token")
    began = min(each.request.arrival_time for each in served)
    num_swapped = sum(step.work.num_swapped_blocks for step in clock.steps)
    return Recorded(
        settings,
        [each.traced(began) for each in served],
        len(seen) - len(served),
        clock.steps,
        Outcome(
            records=[each.record(number, began) for number, each in enumerate(served)],
            samples=[],
            num_replicas=1,
            totals=Totals.of(replay.scheduler.stats(), sum(step.seconds for step in clock.steps), gaps.counts),
        ),
        num_swapped * settings.limits.block_bytes / swap_s if swap_s > 0 else None,
    )


_OF_THE_MEMORY: Final = ("gpu_memory_utilization", "kv_cache_memory", "num_gpu_blocks_override", "kv_cache_dtype")
"""Arguments about memory that a recording does not have; it has the number of blocks instead."""


def recorded_arguments(recorded: Recorded) -> dict[str, Any]:
    """Return the engine arguments of the recorded scheduler, by their names."""
    settings = recorded.settings
    arguments = values_of(settings.cache, CacheArgs) | values_of(settings.scheduler, SchedulerArgs)
    arguments["swap_space"] = settings.limits.num_host_blocks * settings.limits.block_bytes / _GIB
    arguments["max_model_len"] = settings.scheduler.max_model_len
    for name in _OF_THE_MEMORY:
        del arguments[name]
    return {name: value for name, value in arguments.items() if value is not None}


def recorded_costs(name: str, recorded: Recorded) -> Fitted:
    """Return a cost model fitted to the recorded steps, of a device with the recorded cache.

    Raises ConfigError where too few were recorded.
    """
    settings = recorded.settings
    # the fit has no coefficient for swapped blocks
    steps = [step for step in recorded.steps if not step.work.num_swapped_blocks]
    if len(steps) < len(FEATURES):
        raise ConfigError(
            f"the recording has too few steps to fit their cost: {len(steps)} without swapped blocks, needed are "
            f"{len(FEATURES)}; give cost_model, or record more"
        )
    coefficients, error = fit(steps)
    block_bytes, copied_block_s = settings.limits.block_bytes, coefficients.pop(COPIED_BLOCK)
    model = Fitted(
        name=name,
        **coefficients,
        kv_bytes_per_token=block_bytes / settings.cache.block_size,
        num_kv_tokens=settings.limits.num_tokens,
        sliding_window=settings.limits.window,
        swap_bytes_per_s=recorded.swap_bytes_per_s or settings.preemption_costs.swap_bytes_per_s,
        fit_error=error,
    )
    if block_bytes and copied_block_s:
        model = msgspec.structs.replace(model, copy_bytes_per_s=block_bytes / copied_block_s)
    # other programs can make steps of one kind differ much; at least the sum of all times must be right
    block_size = settings.cache.block_size
    measured_s = sum(step.seconds for step in recorded.steps)
    scale = measured_s / sum(model.step_seconds(step.work, block_size) for step in recorded.steps)
    model = msgspec.structs.replace(model, **{name: scale * getattr(model, name) for name in FEATURES})
    return model.with_prefill_rate(_PROMPT_LEN, block_size)


class _StepClock:
    """Computes the seconds of each step from the times of plans and results."""

    def __init__(self, sliding_window: int | None) -> None:
        self.steps: list[MeasuredStep] = []
        self._sliding_window = sliding_window
        self._in_flight: deque[tuple[float, SchedulerOutput]] = deque()
        self._last_end = float("-inf")
        self._unfinished: tuple[StepWork, float] | None = None
        """Work and begin of a step whose result has come, until the next plan ends its time."""

    def planned(self, now: float, step: SchedulerOutput | None) -> None:
        """Note that `schedule` was called; `step` is None when there was nothing to do."""
        self.close(now)
        if step is not None:
            self._in_flight.append((now, step))

    def updated(self, now: float, *, is_busy: bool) -> None:
        """Note that the oldest step has returned. `is_busy`: another one follows at once."""
        planned_at, step = self._in_flight.popleft()
        # with several steps in flight, a step begins when the previous one ends
        self._unfinished = work_of(step, self._sliding_window), max(planned_at, self._last_end)
        self._last_end = now
        if self._in_flight or not is_busy:
            self.close(now)

    def idle(self) -> None:
        """Note that the last requests have ended without a step: the time from here on belongs to no step."""
        self.close(self._last_end)

    def close(self, now: float) -> None:
        """Note that the step that has returned is over."""
        if self._unfinished is not None:
            work, began = self._unfinished
            self.steps.append(MeasuredStep(work, now - began))
            self._last_end, self._unfinished = now, None


def _step_of(result: object, path: str | Path) -> SchedulerOutput | None:
    if result is None:
        return None
    assert isinstance(result, ReplayedStep), "a plan returns a step"
    if not result.is_same or result.step is None:
        raise ConfigError(f"{path} cannot be simulated: this version plans a step otherwise than it was recorded")
    return result.step


@dataclass(slots=True)
class _Seen:
    """A recorded request and its tokens by sequence index, and the time of the last one. num_resets: resets of the
    prefix cache before it ran. Tokens of a beam search come at its end, and only those of the n best.
    """

    request: EngineCoreRequest
    num_resets: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    last_token_time: float = 0.0
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    def add(self, output: EngineCoreOutput, now: float) -> None:
        """Add the output of an update."""
        for delta in output.deltas:
            if delta.token_ids:
                self.last_token_time = now
                self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        self.metrics = output.metrics or self.metrics
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)

    def record(self, number: int, began: float) -> RequestRecord:
        """Return the record of the request, as of a simulated one, with times since `began`."""
        params, lengths = self.request.params, list(map(len, self.tokens.values()))
        record = RequestRecord(
            number=number,
            arrival_s=self.request.arrival_time - began,
            finished_s=self.last_token_time - began,
            num_sequences=params.width,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=params.width * max(lengths) if params.use_beam_search else sum(lengths),
            num_cached_tokens=self.num_cached_tokens,
        )
        if self.metrics is not None and self.metrics.first_scheduled_time is not None:
            record.first_scheduled_s = self.metrics.first_scheduled_time - began
        if self.metrics is not None and self.metrics.first_token_time is not None:
            record.first_token_s = self.metrics.first_token_time - began
        return record

    def traced(self, began: float) -> TraceRequest:
        """Return the request for a trace, with the length that it reached, even if it was aborted or stopped."""
        request, params = self.request, self.request.params
        tokens = [self.tokens.get(index) or [0] for index in range(params.width)]
        is_beam = params.use_beam_search
        salt = request.cache_salt
        if self.num_resets:
            # this salt keeps it from the blocks of requests before the reset, at whatever time the simulation runs them
            salt = f"{salt or ''} after reset {self.num_resets}"
        return TraceRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_time - began,
            prompt_token_ids=request.prompt_token_ids,
            output_len=max(map(len, tokens)),
            output_lens=list(map(len, tokens)) if len(tokens) > 1 and not is_beam else [],
            output_token_ids=[] if is_beam else tokens,
            n=params.n,
            best_of=params.best_of,
            use_beam_search=is_beam,
            priority=request.priority,
            tenant=request.tenant,
            first_token_deadline_s=request.first_token_deadline_s,
            cache_namespace=request.cache_namespace,
            cache_salt=salt,
            adapter=request.adapter,
            placeholders=[(each.offset, each.length, each.digest.hex()) for each in request.placeholders],
        )
