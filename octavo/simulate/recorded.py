"""What a recording says besides decisions: requests as a trace, steps as a cost model, settings as arguments.

With them the same requests can be simulated under other settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from octavo.config.args import CacheArgs, SchedulerArgs
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest
from octavo.core.step import SchedulerOutput
from octavo.engine.recorder import Aborted, Added, CacheReset, Planned, Stopped, Updated
from octavo.errors import ConfigError
from octavo.scheduler.build import SchedulerSettings
from octavo.simulate.cost_model import (
    COPIED_BLOCK,
    FEATURES,
    Fitted,
    MeasuredStep,
    StepWork,
    fit,
    work_of,
)
from octavo.simulate.executor import TokenGaps
from octavo.simulate.outcome import Outcome, RequestRecord, Totals
from octavo.simulate.replay import Replay, ReplayedStep
from octavo.simulate.traces import TraceRequest

_GIB: Final = 1 << 30
_PROMPT_LEN: Final = 512
"""Of the prompt whose rate is that of prefills."""


class Recorded(NamedTuple):
    """requests: those that produced a token, as long as they were. num_left_out: the others, which were refused or
    aborted before. steps: their work and time, with what the engine did before the next one. outcome: of the requests,
    without samples. swap_bytes_per_s: measured; None when nothing was swapped."""

    settings: SchedulerSettings
    requests: list[TraceRequest]
    num_left_out: int
    steps: list[MeasuredStep]
    outcome: Outcome
    swap_bytes_per_s: float | None


def read_recorded(path: str | Path, progress: Callable[[float], None] | None = None) -> Recorded:
    """Raises ConfigError for a file that is no recording, or that this version decides otherwise."""
    replay = Replay(path, progress)
    requests: dict[str, EngineCoreRequest] = {}
    outputs: dict[str, _Output] = {}
    clock = _StepClock(replay.settings.limits.window)
    swap_s, num_resets = 0.0, 0
    epochs: dict[str, int] = {}
    gaps = TokenGaps()
    for event, result in replay.events():
        match event:
            case Added(added):
                requests |= {request.request_id: request for request in added}
                epochs |= dict.fromkeys((request.request_id for request in added), num_resets)
            case CacheReset() if result:
                num_resets += 1
                epochs |= dict.fromkeys(replay.scheduler.groups, num_resets)
            case Planned(now, _):
                clock.planned(now, _step_of(result, path))
            case Aborted() | Stopped():
                if not replay.scheduler.groups:
                    clock.idle()
            case Updated(now, output):
                clock.updated(now, is_busy=bool(replay.scheduler.groups))
                swap_s += output.swap_s
                gaps.note([row.seq_id for row in output.rows if row.tokens], now)
                assert isinstance(result, list), "an update answers outputs"
                for each in result:
                    outputs.setdefault(each.request_id, _Output()).take(each, now)
    served = [
        (request, outputs[name]) for name, request in requests.items() if name in outputs and outputs[name].tokens
    ]
    if not served:
        raise ConfigError(f"{path} has no request that produced a token")
    began = min(request.arrival_time for request, _ in served)
    settings = replay.settings
    num_swapped = sum(step.work.num_swapped_blocks for step in clock.steps)
    return Recorded(
        settings,
        [_traced(request, output, began, epochs[request.request_id]) for request, output in served],
        len(requests) - len(served),
        clock.steps,
        Outcome(
            records=[_record(number, *each, began) for number, each in enumerate(served)],
            samples=[],
            num_replicas=1,
            totals=Totals.of(replay.scheduler.stats(), sum(step.seconds for step in clock.steps), gaps.counts),
        ),
        num_swapped * settings.limits.block_bytes / swap_s if swap_s > 0 else None,
    )


_OF_THE_MEMORY: Final = ("gpu_memory_utilization", "kv_cache_memory", "num_gpu_blocks_override", "kv_cache_dtype")
"""Arguments that a recording says nothing about: its blocks are counted."""


def recorded_arguments(recorded: Recorded) -> dict[str, Any]:
    """The engine arguments that a scheduler was recorded with, by their names."""
    settings = recorded.settings
    sections = ((settings.cache, CacheArgs), (settings.scheduler, SchedulerArgs))
    arguments = {each.name: getattr(section, each.name) for section, kind in sections for each in fields(kind)}
    arguments["swap_space"] = settings.limits.num_host_blocks * settings.limits.block_bytes / _GIB
    arguments["max_model_len"] = settings.scheduler.max_model_len
    for name in _OF_THE_MEMORY:
        del arguments[name]
    return {name: value for name, value in arguments.items() if value is not None}


def recorded_costs(name: str, recorded: Recorded) -> Fitted:
    """A cost model fitted to the recorded steps, of a device with the recorded cache. Raises ConfigError where too few
    were recorded."""
    settings = recorded.settings
    # the fit knows nothing of swapped blocks
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
    # where steps of one kind differ much, because of other programs, the sum of them all must be right at least
    block_size = settings.cache.block_size
    measured_s = sum(step.seconds for step in recorded.steps)
    scale = measured_s / sum(model.step_seconds(step.work, block_size) for step in recorded.steps)
    model = msgspec.structs.replace(model, **{name: scale * getattr(model, name) for name in FEATURES})
    return model.with_prefill_rate(_PROMPT_LEN, block_size)


class _StepClock:
    """From the times of plans and results to seconds of steps."""

    def __init__(self, sliding_window: int | None) -> None:
        self.steps: list[MeasuredStep] = []
        self._sliding_window = sliding_window
        self._in_flight: deque[tuple[float, SchedulerOutput]] = deque()
        self._last_end = float("-inf")
        self._unfinished: tuple[StepWork, float] | None = None
        """Work and begin of a step that has returned, while the engine goes on to the next one."""

    def planned(self, now: float, step: SchedulerOutput | None) -> None:
        """`schedule` was called; None: there was nothing to do."""
        self.close(now)
        if step is not None:
            self._in_flight.append((now, step))

    def updated(self, now: float, *, is_busy: bool) -> None:
        """The oldest step has returned; `is_busy`: there is more to do at once."""
        planned_at, step = self._in_flight.popleft()
        # with several in flight one begins when the one before it ends
        self._unfinished = work_of(step, self._sliding_window), max(planned_at, self._last_end)
        self._last_end = now
        if self._in_flight or not is_busy:
            self.close(now)

    def idle(self) -> None:
        """Without a step, what was left to do is gone: what the engine waits for from here on is no part of one."""
        self.close(self._last_end)

    def close(self, now: float) -> None:
        """The step that has returned is over."""
        if self._unfinished is not None:
            work, began = self._unfinished
            self.steps.append(MeasuredStep(work, now - began))
            self._last_end, self._unfinished = now, None


def _step_of(result: object, path: str | Path) -> SchedulerOutput | None:
    if result is None:
        return None
    assert isinstance(result, ReplayedStep), "a plan answers a step"
    if not result.is_same or result.step is None:
        raise ConfigError(f"{path} cannot be simulated: this version plans a step otherwise than it was recorded")
    return result.step


class _Output:
    """What a request has produced: tokens by index, and the times of the first and the last. Tokens of beams come when
    the search is over, and those of the n best alone."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.last_token_time = 0.0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.num_cached_tokens = 0

    def take(self, output: EngineCoreOutput, now: float) -> None:
        """Add what an update brought."""
        for delta in output.deltas:
            if delta.token_ids:
                self.last_token_time = now
                self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        if output.metrics is not None:
            self.first_scheduled_time = output.metrics.first_scheduled_time
            self.first_token_time = output.metrics.first_token_time
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)


def _record(number: int, request: EngineCoreRequest, output: _Output, began: float) -> RequestRecord:
    params, lengths = request.params, list(map(len, output.tokens.values()))
    return RequestRecord(
        number=number,
        arrival_s=request.arrival_time - began,
        first_scheduled_s=_since(began, output.first_scheduled_time),
        first_token_s=_since(began, output.first_token_time),
        finished_s=output.last_token_time - began,
        num_sequences=params.width,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=params.width * max(lengths) if params.use_beam_search else sum(lengths),
        num_cached_tokens=output.num_cached_tokens,
    )


def _since(began: float, time: float | None) -> float | None:
    return None if time is None else time - began


def _traced(request: EngineCoreRequest, output: _Output, began: float, epoch: int) -> TraceRequest:
    """Return a request with what it produced; what was aborted or stopped ends where it was.

    `epoch`: resets of the prefix cache before it ran. A salt keeps it from the blocks of earlier ones, at whatever time
    the simulation runs them.
    """
    params = request.params
    tokens = [output.tokens.get(index) or [0] for index in range(params.width)]
    is_beam = params.use_beam_search
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
        cache_salt=f"{request.cache_salt or ''} after reset {epoch}" if epoch else request.cache_salt,
        adapter=request.adapter,
        placeholders=[(each.offset, each.length, each.digest.hex()) for each in request.placeholders],
    )
