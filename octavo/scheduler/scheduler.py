"""The scheduler: closes the gap between known and computed tokens of every sequence, within budgets and blocks.

Prefill, a chunk of a prefill, decode and resumption are the same line: a row computes the next tokens of a sequence,
and draws when it reaches the last. Steps may be planned before earlier ones have returned; what is computed does not
depend on when they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from typing import Literal

import msgspec

from octavo.config.schema import SchedulerConfig
from octavo.core.adapter import LoRARequest
from octavo.core.cache_key import CacheKey
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, RequestTimeline, SchedulerStats
from octavo.core.outputs import PinnedPrefix, RequestError
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import InvalidRequest, RequestTooLarge
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.connector import Connector
from octavo.scheduler.adapters import AdapterCalls, Adapters
from octavo.scheduler.admission import Admission
from octavo.scheduler.admission_control import AdmissionControl
from octavo.scheduler.classic import ClassicPlanner
from octavo.scheduler.continuous import ContinuousPlanner
from octavo.scheduler.drafts import DraftMeter, Proposer
from octavo.scheduler.fetching import Fetching
from octavo.scheduler.plan import begin_plan
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry
from octavo.scheduler.results import Results
from octavo.scheduler.rows import RowPlanner

Holding = Literal["new", "all"] | None
"""Which requests are held back: those that have never run, all, or none."""


class Scheduler:
    """`schedule` plans a step, `update` applies the results of the oldest one.

    groups: every request that has not ended, by id.
    waiting: groups without blocks. running: groups with blocks on the device, in order of arrival. swapped: groups with
        blocks on the host.
    holding: what `hold` has set. log: the last decisions and their reasons. rates: how fast this engine computes.
    plans_again: whether the last plan had no rows, because it preempted the groups whose turn it was: the next one has
        rows of those that still run. find, take_ended: of the registry.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        config: SchedulerConfig,
        policy: Policy | None = None,
        rates: Rates | None = None,
        *,
        sends_tokens: bool = False,
        proposer: Proposer | None = None,
        connector: Connector | None = None,
        adapter_calls: AdapterCalls | None = None,
    ) -> None:
        """sends_tokens: steps carry the tokens drawn since the last one, for workers that do not draw. Then the
        sequences that decode take turns in the steps in flight.

        proposer: guesses tokens that the next rows verify. connector: has prefixes that the local cache does not have,
        and other engines fetch from it. adapter_calls: reach the ranks that read adapters; without them requests get
        no slots.
        """
        self.block_manager = block_manager
        self.config = config
        self.connector = connector
        self.policy = policy = policy or Policy()
        self.rates = rates = rates or Rates()
        all_wait = sends_tokens or proposer is not None
        self._registry = registry = Registry(block_manager, policy, waits_for_results=all_wait, connector=connector)
        self.holding: Holding = None
        self.plans_again = False
        self.log = registry.log
        self.groups, self.waiting = registry.groups, registry.waiting
        self.running, self.swapped = registry.running, registry.swapped
        self.find, self.take_ended = registry.find, registry.take_ended
        self._admission_control = AdmissionControl(config, registry, rates)
        self._preemption = Preemption(registry, config.preemption_mode, rates)
        self._drafts = None if proposer is None else DraftMeter(proposer, registry)
        self._results = Results(registry, self._preemption)
        num_microbatches = config.max_steps_in_flight if sends_tokens else 1
        self._rows = RowPlanner(registry, self._preemption, proposer, num_microbatches, sends_tokens=sends_tokens)
        self._fetching = None if connector is None else Fetching(registry, connector)
        self._adapters = None
        if adapter_calls is not None:
            self._adapters = Adapters(registry, adapter_calls, config.max_loras, config.max_cpu_loras)
        self._admission = Admission(registry, self._rows, self._preemption, config, self._fetching, self._adapters)
        self._planner: ContinuousPlanner | ClassicPlanner
        if config.enable_chunked_prefill:
            self._planner = ContinuousPlanner(registry, self._rows, self._admission, rates, config)
        else:
            self._planner = ClassicPlanner(registry, self._rows, self._admission, config)

    def groups_with_blocks(self) -> list[SequenceGroup]:
        """Return the groups on the device, the running ones first, and behind them those on the host."""
        return [*self._registry.on_device, *sorted(self.swapped, key=lambda group: group.arrival)]

    # ---- requests arrive and end ----

    def refusal(self, request: EngineCoreRequest) -> RequestError | None:
        """Return why a request can never run here, even alone; None when it can."""
        config, params, num_tokens = self.config, request.params, len(request.prompt_token_ids)
        try:
            limits = self.block_manager.limits
            limits.check_runs_alone(num_tokens, params.max_tokens or 1, params, config.max_num_seqs)
            if request.lora_request is not None and self._adapters is None:
                raise InvalidRequest(
                    f"the request uses the adapter {request.lora_request.lora_name}, and this engine runs none; start "
                    "it with enable_lora",
                    field="lora_request",
                    code="adapters_off",
                )
            if not config.enable_chunked_prefill and num_tokens > config.max_num_batched_tokens:
                raise RequestTooLarge(
                    f"the prompt has {num_tokens} tokens, and without chunked prefill a step computes it whole in at "
                    f"most max_num_batched_tokens = {config.max_num_batched_tokens}; shorten it, raise "
                    "max_num_batched_tokens, or enable chunked prefill",
                    field="prompt",
                )
        except InvalidRequest as error:
            return RequestError.of(error)
        return None

    def add_together(self, requests: SequenceABC[EngineCoreRequest]) -> None:
        """Queue requests, all of them or none: then each ends at once, with an output that has the reason."""
        for request in requests:
            assert request.request_id not in self.groups, f"request {request.request_id} is there already"
        groups = self._registry.new_groups(requests)
        # both times are the same in a replay
        now = max(self.log.now, *(request.arrival_time for request in requests))
        new = [group for group in groups if group.request.metrics is None]
        error = next(filter(None, map(self.refusal, requests)), None)
        if error is None and new:
            error = self._admission_control.refusal(new, now)
        for group in groups:
            if error is None:
                self._registry.add(group)
                if group.request.resumed:
                    self._results.end_complete(group, now)
            else:
                self._registry.send(EngineCoreOutput.failed(group.request_id, error))
                self.log.note("refused", group.request, error.message)

    def abort(self, request_ids: Iterable[str], now: float | None = None) -> None:
        """End requests without an output. Unknown ids (finished in the meantime) are skipped.

        `now` is for the timeline alone; None stands for the time at which the last step was planned. `stop_sequence`
        has the same argument.
        """
        for request_id in request_ids:
            group = self.groups.get(request_id)
            if group is not None:
                self._registry.end_group(group, SequenceStatus.FINISHED_ABORTED, self.log.now if now is None else now)

    def stop_sequence(self, request_id: str, index: int, now: float | None = None) -> None:
        """End one sequence whose text contains a stop string. No output follows, also when it was the last one."""
        group = self.groups.get(request_id)
        sequence = next((s for s in group.live if s.index == index), None) if group is not None else None
        if group is None or sequence is None:
            return
        if group.refork_at is not None and sequence is group.live[0] and len(group.live) > 1:
            # it was computing the common prefix for its siblings: they start over
            self._preemption.preempt(group, because="its leader met a stop string")
        self._registry.end_sequence(group, sequence, SequenceStatus.FINISHED_STOPPED)
        if not group.live:
            self._registry.end_group(group, SequenceStatus.FINISHED_STOPPED, self.log.now if now is None else now)

    def hold(self, what: Holding) -> None:
        """Plan no rows of these requests, until another call; they keep the blocks that they have."""
        self.holding = what
        self._registry.hold_new(what == "new")

    @property
    def has_begun(self) -> bool:
        """Whether there are requests that are not held as ones that have never run."""
        return len(self.groups) > len(self._registry.held)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` returns an output."""
        return self._registry.has_ended

    @property
    def awaits_blocks(self) -> bool:
        """Whether a request waits for blocks that are fetched, or that are kept because something reads or writes
        them, or for an adapter that is read."""
        if self._adapters is not None and self._adapters.is_reading:
            return True
        return bool(self._registry.fetching) or bool(self.groups and self.block_manager.holds)

    def has_unfinished(self) -> bool:
        return bool(self.groups) or self._registry.has_ended

    def update(self, output: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Apply the results of the oldest step at time `now`. Returns one output for each request that has news."""
        self.rates.note_done(now, output.swap_s)
        if self._drafts is not None:
            self._drafts.note_done(output, self.rates.last_step_s)
        return self._results.apply(output, now)

    def reset_prefix_cache(self, *, preempts: bool = False) -> bool:
        """Forget cached prefixes and pins. Returns False, and changes nothing, while requests have blocks.

        preempts: they lose them first, and are computed again; no step may be in flight. Then only transfers that are
        under way refuse it.
        """
        if preempts:
            if self.block_manager.holds:
                return False
            self._preempt_all("the prefix cache is forgotten")
        return self.block_manager.reset_prefix_cache()

    def end_transfers(self) -> None:
        """Let blocks that move between engines be free soon, as `Fetching.end_transfers` does."""
        if self._fetching is not None:
            self._fetching.end_transfers()

    def _preempt_all(self, because: str) -> None:
        for group in list(self.running):
            self._preemption.preempt(group, because=because)
        while (swapped := self.swapped.peek()) is not None:
            self._preemption.drop_swapped(swapped, because)

    def restart(self, because: str, now: float) -> None:
        """Free the blocks of all requests and forget what is cached, as if every request were preempted and recomputed,
        and the workers held nothing. No step may be in flight.
        """
        self.log.now = now
        self._preempt_all(because)
        self._registry.forget_released()  # the workers no longer have any
        if self._adapters is not None:
            self._adapters.restart()
        assert self.block_manager.reset_prefix_cache(), "no request has blocks"

    def pin_prefix(self, token_ids: list[int], cache_key: CacheKey, until: float) -> PinnedPrefix:
        """Keep this prefix in the cache until that time: blocks that are cached already, and the others once they
        are.
        """
        if not self.block_manager.enable_prefix_caching:
            return PinnedPrefix(because="prefix caching is off")
        return self.block_manager.pins.pin(token_ids, cache_key, until)

    def unpin_prefix(self, token_ids: list[int], cache_key: CacheKey) -> bool:
        """End a pin before its time. Returns False when there is none of exactly this prefix."""
        return self.block_manager.pins.unpin(token_ids, cache_key)

    def read_adapter(self, adapter: LoRARequest) -> str | None:
        """Read an adapter into host memory, as `Adapters.read` does."""
        if self._adapters is None:
            return "this engine runs no adapters; start it with enable_lora"
        return self._adapters.read(adapter)

    # ---- planning ----

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Return the next step, planned at time `now` (seconds, monotonic); None when there is nothing to submit.

        A step may have no rows, and only move blocks.
        """
        registry = self._registry
        self.log.begin(registry.next_step_id, now)
        self.block_manager.pins.expire(now)
        if self._fetching is not None:
            self._fetching.collect(now)
        if self._adapters is not None:
            self._adapters.collect()
        plan = begin_plan(self.config, registry) if self.holding == "all" else self._planner.plan(now)
        if self._adapters is not None:
            self._adapters.end_failed(now)
        self.block_manager.end_planning()
        self._admission_control.note_planned()
        for group, sequence in plan.to_publish.values():
            registry.publish(group, sequence)
        if self._fetching is not None:
            plan.connector = self._fetching.payload(registry.next_step_id, has_work=plan.has_work)
        self.plans_again = plan.has_preempted and not plan.has_work
        if plan.connector is None and not plan.has_work:
            return None
        if self.policy.counts_service:
            for row in plan.rows.values():
                self.policy.note_service(registry.group_of(row.seq_id), row.num_tokens, row.num_samples)
        self.block_manager.release_unseen(registry.sequences_on_device())
        step = plan.output(*registry.begin_step(plan.rows, len(plan.swap_outs), len(plan.swap_ins)))
        moves = step.block_ops.swap_outs + step.block_ops.swap_ins
        num_moved_bytes = self.block_manager.swap_space.num_bytes(moves) if moves else 0
        num_allowed = plan.num_allowed_prompt_tokens
        self.rates.note_planned(now, len(step.rows), plan.num_prompt_tokens, num_moved_bytes, num_allowed=num_allowed)
        if self._drafts is not None:
            self._drafts.note_planned(step, plan)
        return step

    # ---- state ----

    @property
    def timelines(self) -> list[RequestTimeline]:
        """The timelines of the most recently ended requests, oldest first."""
        return list(self._registry.timelines)

    def stats(self) -> SchedulerStats:
        """Return a copy of the statistics as they are now."""
        adapters = {} if self._adapters is None else self._adapters.stats()
        return msgspec.structs.replace(
            self._registry.stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self._registry.held),
            num_swapped=len(self.swapped),
            num_used_blocks=self.block_manager.num_used_blocks,
            num_pinned_blocks=self.block_manager.pins.num_blocks,
            num_used_host_blocks=self.block_manager.num_used_host_blocks,
            **adapters,
        )
