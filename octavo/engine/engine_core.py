"""The engine core: scheduler and executor in one synchronous step. Processes are wrappers around it."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from octavo.config.schema import EngineConfig
from octavo.core.adapter import LoRARequest
from octavo.core.block_events import BlockEvents
from octavo.core.cache_key import CacheKey
from octavo.core.cache_limits import CacheLimits
from octavo.core.live import LiveState
from octavo.core.messages import CoreReady, EngineCoreOutput, EngineCoreRequest, SchedulerStats, StepOutputs, id_in_use
from octavo.core.outputs import PinnedPrefix, RequestError
from octavo.core.resume import check_resumed
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.engine.beam_texts import BeamTexts
from octavo.engine.core_start import fitting_max_model_len, loaded, proposer_of, publish_events, try_encoders
from octavo.engine.pause import Pause
from octavo.engine.profiling import switch_profile
from octavo.engine.recorder import RecordedScheduler, Recorder
from octavo.engine.sleep import Sleep, WeightVersion
from octavo.engine.text.tokenizer import Tokenizer
from octavo.engine.timed_scheduler import TimedScheduler
from octavo.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequest
from octavo.executor.executor import Executor, make_executor
from octavo.kv_cache.events import EventLog
from octavo.kv_transfer.connector import Connector
from octavo.scheduler.adapters import AdapterCalls
from octavo.scheduler.build import SchedulerSettings, build_scheduler
from octavo.scheduler.scheduler import Scheduler

_LAST_SAVES_S: Final = 5.0
"""How long the end of an engine may wait for blocks that are being saved."""
_UNMEASURED_TOKENS_PER_S: Final = 20.0
"""The speed assumed before anything is measured: slower than any useful device."""


class EngineCore:
    """Accepts requests, and returns what each `step` produced. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        ready: CoreReady,
        *,
        max_steps_in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
        open_tokenizer: Callable[[], Tokenizer] | None = None,
        on_shutdown: Callable[[], object] | None = None,
        can_sleep: bool = False,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.ready = ready
        self._depth = max_steps_in_flight
        self.clock = clock
        self._on_shutdown = on_shutdown
        self._timed: TimedScheduler | None = None
        """Calls the scheduler in a step while step times are reported."""
        self._in_flight: deque[Future[ModelRunnerOutput]] = deque()
        self._kept: list[EngineCoreOutput] = []
        """Outputs that the next step returns: of requests that were refused, and of steps that were waited for."""
        self.sleep = Sleep(executor, self._restart, is_allowed=can_sleep)
        self.pause = Pause(self)
        self.version = WeightVersion(self.finish_steps)
        self._beam_texts = BeamTexts(open_tokenizer)
        self._kv_events: EventLog | None = None
        self._last_step: SchedulerOutput | None = None
        self.announce: Callable[[StepOutputs], None] | None = None
        """Sends before a step which requests it computes for the first time: if the step ends the process, the front
        knows what ran in it."""
        self.is_waiting = False
        """Whether the last step found nothing to compute: all requests wait for blocks that others read or write."""

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        on_death: Callable[[str], None] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> EngineCore:
        """Load the model, size the cache, and be ready. Raises ConfigError or CheckpointError.

        Without `tokenizer` the model's own is opened when it is needed. on_death: called with the reason, from any
        thread, as soon as a rank has failed or died, also between steps. wake: called from any thread when a core that
        `is_waiting`, or that is idle, is to step again.
        """
        moves_blocks = config.transfer.moves_blocks
        connector: Connector | None = None

        def on_note(rank: int, payload: bytes) -> None:
            if connector is not None:
                connector.note(rank, payload)

        executor = make_executor(config, on_death, on_note if moves_blocks else None)
        try:
            plans = loaded(executor)
            plan, limits = plans[0], CacheLimits.of_ranks([each.cache for each in plans])
            max_model_len = fitting_max_model_len(config.model, limits)
            settings = SchedulerSettings(
                cache=config.cache, scheduler=config.scheduler, limits=limits, sends_tokens=executor.sends_tokens
            )
            proposer = proposer_of(config.speculative, limits, is_prefill=config.transfer.role == "prefill")
            depth, recorder = config.scheduler.max_steps_in_flight, None
            if (record_to := config.observability.record_trace) is not None:
                recorder = Recorder(record_to, settings, depth, proposer)
                proposer = recorder.proposer
            connect = None
            if moves_blocks:
                from octavo.kv_transfer.build import make_connector

                connect = partial(make_connector, config, executor.call, wake)
            adapters = AdapterCalls(executor.call, wake) if config.lora.enable_lora else None
            scheduler = build_scheduler(settings, proposer, connect=connect, adapter_calls=adapters)
            connector = scheduler.connector
            listeners, publishing = scheduler.block_manager.listeners, config.observability.kv_events_config
            publisher = publish_events(publishing, limits, listeners, config.replicas.number)
            ready = CoreReady(
                cache=limits,
                max_model_len=max_model_len,
                vocab_size=config.model.vocab_size,
                plan=plan.render(),
                plan_summary=plan.summarize(),
                plan_bar=plan.render_bar(),
                transfer=None if connector is None else connector.address,
                takes_embeds=config.model.embedding_size is not None,
            )
            try_encoders(executor, config.model, ready, config.scheduler.max_num_batched_tokens)
        except BaseException:
            executor.shutdown()
            raise
        to_close = [each for each in (recorder or connector, publisher) if each is not None]
        core = cls(
            executor,
            scheduler if recorder is None else RecordedScheduler.around(scheduler, recorder),
            ready,
            max_steps_in_flight=depth,
            on_shutdown=lambda: [each.close() for each in to_close],
            can_sleep=config.model.enable_sleep_mode,
            open_tokenizer=lambda: tokenizer or Tokenizer.open(config.model.tokenizer_path),
        )
        if config.observability.enable_kv_events:
            core.log_kv_events()
        # ranks in other processes end with the core, not only with the program
        weakref.finalize(core, executor.shutdown).atexit = False
        return core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add one request, as `add_requests` does."""
        self.add_requests([request])

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """Add requests that arrived together: all of them, or each gets an output with an error. Raises nothing."""
        self.is_waiting = False
        try:
            self._check_ids(requests)
            for request in requests:
                check_resumed(request, self.ready.vocab_size, self.ready.max_model_len)
                self._beam_texts.add(request)
        except (CheckpointError, ConfigError) as failure:
            error = RequestError(str(failure), field="stop")
        except InvalidRequest as failure:
            error = RequestError.of(failure)
        else:
            self.scheduler.add_together(requests)
            return
        self._kept += [EngineCoreOutput.failed(request.request_id, error) for request in requests]

    def _check_ids(self, requests: list[EngineCoreRequest]) -> None:
        for request_id, count in Counter(request.request_id for request in requests).items():
            if count > 1 or request_id in self.scheduler.groups:
                raise id_in_use(request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests; no output follows for them. Unknown ids are ignored."""
        self.is_waiting = False
        kept = (*self._kept, *self.scheduler.take_ended())  # before the next step the ids may be those of others
        self._kept = [each for each in kept if each.request_id not in request_ids]
        self.scheduler.abort(request_ids, self.clock())

    def drop_requests(self) -> int:
        """End all requests, and a pause, of which the next front knows nothing. No output follows for them. Returns
        their number."""
        request_ids = list(self.scheduler.groups)
        self.abort_requests(request_ids)
        self._kept.clear()
        self.scheduler.take_ended()
        self.pause.end()
        return len(request_ids)

    def end_requests(self) -> None:
        """End all requests; the last output of each follows, which has no tokens: its finish reason is "abort"."""
        kept = [*self._kept, *self.scheduler.take_ended()]  # tokens that requests have got count
        groups = list(self.scheduler.groups.values())
        self.abort_requests([group.request_id for group in groups])
        self._kept = kept + [
            EngineCoreOutput(request_id=group.request_id, deltas=[], finished=True, metrics=group.metrics)
            for group in groups
        ]

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text met a stop string; no output follows for it."""
        self.is_waiting = False
        self.scheduler.stop_sequence(request_id, index, self.clock())

    @property
    def is_still(self) -> bool:
        """Return whether a sleep or a pause holds requests back."""
        return self.sleep.is_on or self.pause.is_on

    @property
    def has_news(self) -> bool:
        """Return whether the next step returns outputs, whatever it computes."""
        return bool(self._kept) or self.scheduler.has_ended

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished() or bool(self._kept) or bool(self._in_flight)

    def step(self) -> StepOutputs:
        """Keep the executor busy up to the depth, then wait for the oldest step and process its results.

        Raises what the executor raises; the core is of no use afterwards.
        """
        while len(self._in_flight) < self._depth and not self.sleep.is_on:
            step = (self._timed or self.scheduler).schedule(self.clock())
            if step is None:
                if self.scheduler.plans_again:
                    continue
                break
            self._last_step = step
            if self.announce is not None and step.new_sequences:
                groups = [self.scheduler.find(each.seq_id)[0] for each in step.new_sequences]
                began = list(dict.fromkeys(group.request_id for group in groups if group is not None))
                self.announce(StepOutputs(outputs=[], stats=self.stats(), began=began))
            self._in_flight.append(self.executor.submit(step))
        outputs, self._kept = self._kept, []
        outputs += self.scheduler.take_ended()
        self.is_waiting = False
        if self._in_flight:
            outputs += self._take_oldest()
        else:
            waits = self.scheduler.awaits_blocks or self.is_still
            assert outputs or waits or not self.scheduler.groups, "requests are left, but no step can be planned"
            self.is_waiting = waits and not outputs
        times = None if self._timed is None else self._timed.take_times()
        return StepOutputs(outputs=outputs, stats=self.stats(), times=times)

    def _take_oldest(self) -> list[EngineCoreOutput]:
        result = self._in_flight.popleft().result()
        result = self._beam_texts.mark(result, self.scheduler.find, self.scheduler.groups)
        outputs = (self._timed or self.scheduler).update(result, self.clock())
        return outputs if self.version.label is None else self.version.mark(outputs)

    def finish_steps(self) -> None:
        """Wait for the steps in flight; the next step returns their outputs."""
        while self._in_flight:
            self._kept += self._take_oldest()

    def _restart(self, because: str) -> None:
        self.finish_steps()
        if self._timed is not None:
            self.time_steps(False)
        self.scheduler.restart(because, self.clock())

    def longest_step_s(self) -> float:
        """Return the seconds of a step with as many tokens as it may have, at the speed that is measured or given."""
        tokens_per_s = self.scheduler.rates.known_prefill_tokens_per_s or _UNMEASURED_TOKENS_PER_S
        return self.scheduler.config.max_num_batched_tokens / tokens_per_s

    def stats(self) -> SchedulerStats:
        """Return the statistics as they are now."""
        stats = self.scheduler.stats()
        stats.num_paused, stats.num_sleeping = int(self.pause.is_on), int(self.sleep.is_on)
        return stats

    def reset_prefix_cache(self, preempts: bool = False) -> bool:
        """Drop all cached prefixes and pins, as `Scheduler.reset_prefix_cache` does."""
        if preempts:
            self.finish_steps()
        return self.scheduler.reset_prefix_cache(preempts=preempts)

    def pin_prefix(self, token_ids: list[int], ttl_s: float, *key: str | None) -> PinnedPrefix:
        """Keep a prefix in the cache for `ttl_s` seconds from now, also when it is computed later. key: its salt,
        namespace and adapter."""
        return self.scheduler.pin_prefix(token_ids, _cache_key(*key), self.clock() + ttl_s)

    def read_adapter(self, *fields: Any) -> str | None:
        """Have the workers read an adapter, as `Adapters.read` does. fields: those of a `LoRARequest`."""
        self.sleep.check_awake("read_adapter")
        return self.scheduler.read_adapter(LoRARequest(*fields))

    def log_kv_events(self) -> None:
        """Keep what enters and leaves the prefix cache from now on, for the control call `kv_events`."""
        self._kv_events = EventLog()
        self.scheduler.block_manager.listeners.append(self._kv_events)

    def kv_events(self, read: list[int]) -> list[BlockEvents]:
        """Return what a reader lacks (`EventLog.after`); nothing where no events are kept."""
        return [] if self._kv_events is None else [self._kv_events.after(read)]

    def live(self, within_s: float) -> list[LiveState]:
        """Return the state with the entries of the last `within_s` seconds, in a list."""
        from octavo.engine.live_state import live_state

        state = live_state(self.scheduler, self._last_step, self.clock(), within_s)
        return [msgspec.structs.replace(state, stats=self.stats())]

    def release_memory(self) -> None:
        """Release the memory of empty KV blocks and of activations. No effect while requests run."""
        if not self.has_unfinished() and not self.sleep.is_on:
            self.executor.call("release_memory", self.scheduler.block_manager.empty_blocks())

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call, as built-in types. Raises ConfigError for an unknown name."""
        calls: dict[str, Callable[..., Any]] = {
            "stats": self.stats,
            "decisions": lambda: self.scheduler.log.entries,
            "timelines": lambda: self.scheduler.timelines,
            "pin_prefix": self.pin_prefix,
            "unpin_prefix": lambda token_ids, *key: self.scheduler.unpin_prefix(token_ids, _cache_key(*key)),
            "read_adapter": self.read_adapter,
            "kv_events": self.kv_events,
            "live": self.live,
            "reset_prefix_cache": self.reset_prefix_cache,
            "release_memory": self.release_memory,
            "time_steps": self.time_steps,
            "is_sleeping": lambda: self.sleep.is_on,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "check_weights": self.sleep.check_weights,
            "update_weights": self.sleep.update_weights,
            "set_weight_version": self.version.set,
            "get_weight_version": self.version.get,
            "is_paused": lambda: self.pause.is_on,
            "pause": self.pause.begin,
            "pause_is_complete": self.pause.is_complete,
            "resume": self.pause.end,
            "profile": partial(switch_profile, self.executor),
        }
        if method not in calls:
            raise ConfigError(f"{method} is not a control call; there are {sorted(calls)}")
        return msgspec.to_builtins(calls[method](*arguments), builtin_types=(bytes,))

    def _sleep(self) -> None:
        self.sleep.begin()
        self.pause.end()  # requests go on when the sleep ends

    def _wake_up(self) -> None:
        self.sleep.end()
        self.pause.end()

    def time_steps(self, is_on: bool) -> None:
        """Report the times of each step's parts with its outputs from now on, or no longer."""
        self.sleep.check_awake("time_steps")
        self.executor.call("time_steps", is_on)
        self._timed = TimedScheduler(self.scheduler) if is_on else None

    def _finish_saves(self, connector: Connector) -> None:
        deadline = time.monotonic() + _LAST_SAVES_S
        while connector.is_saving and time.monotonic() < deadline:
            step = self.scheduler.schedule(self.clock())
            if step is None:
                time.sleep(0.002)  # until a rank has noted the end of a save
            else:
                self.scheduler.update(self.executor.submit(step).result(), self.clock())

    def shutdown(self) -> None:
        """Release the executor, after what waits to be kept elsewhere has been saved, for a few seconds. Idempotent."""
        self._in_flight.clear()
        connector = self.scheduler.connector
        if connector is not None and connector.is_saving and not self.scheduler.groups:
            with suppress(EngineDeadError):
                self._finish_saves(connector)
        if self._on_shutdown is not None:
            self._on_shutdown()
        self.executor.shutdown()


def _cache_key(salt: str | None = None, namespace: str | None = None, adapter: str | None = None) -> CacheKey:
    return CacheKey(salt, adapter, cache_namespace=namespace)
