"""How a running group gives way: its blocks are computed again later, or moved to the host and back.

The modes are those of vLLM's first engine and one more: `recompute` and `swap` always do that (swap as long as the
host has room), `classic` swaps groups with several live sequences and recomputes the others, `auto` takes what is
estimated to cost less time.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.config.schema import PreemptionMode
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import AllocStatus
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.budget import PartialBudget
from octavo.scheduler.decisions import DecisionLog
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry


class Decision(NamedTuple):
    """Swap or recompute, and the reason in words."""

    swap: bool
    because: str


class Preemption:
    """Takes groups off the device."""

    def __init__(self, registry: Registry, log: DecisionLog, mode: PreemptionMode, rates: Rates) -> None:
        self._registry = registry
        self._log = log
        self._mode = mode
        self._rates = rates

    def preempt(
        self, group: SequenceGroup, plan: StepPlan | None = None, tokens: PartialBudget | None = None, because: str = ""
    ) -> None:
        """Take a running group's blocks and its rows in `plan` away. Known tokens stay known."""
        registry, manager = self._registry, self._registry.block_manager
        # where each computed token is, without what this very step would have computed or copied
        computed: dict[int, int] = {}
        copied_from: dict[int, int] = {}
        for sequence in group.live:
            computed[sequence.seq_id] = sequence.num_computed_tokens
            if plan is not None:
                prefix_copies = plan.prefix_copies.pop(sequence.seq_id, ())
                copied_from.update((copy.target, copy.source) for copy in prefix_copies)
            dropped = plan.drop(sequence) if plan is not None else None
            if dropped is not None:
                row, message, copies = dropped
                computed[sequence.seq_id] = row.start
                copied_from.update((copy.target, copy.source) for copy in copies)
                if tokens is not None:
                    tokens.refund(row.num_tokens)
                if message is not None:
                    sequence.is_resident = False  # the worker never heard of it
            if sequence.is_resident:
                registry.released.append(sequence)
        decision = self._decide(group, plan)
        if decision.swap:
            assert plan is not None
            for sequence in group.live:
                sequence.pause(computed[sequence.seq_id])
            moves = manager.swap_out(group.live)
            # a copy that this step would have made is not made: what it would have copied is still at its source
            plan.swap_outs += [BlockCopy(_origin(move.source, copied_from), move.target) for move in moves]
            registry.stats.num_preemptions_by_swap += 1
            registry.stats.num_swapped_out_blocks += len(moves)
        else:
            group.num_dropped_tokens = _num_computed_tokens(group, computed)
            for sequence in group.live:
                manager.free(sequence)
                sequence.restart()
        group.refork_at = None
        group.was_preempted = True
        group.metrics.num_preemptions += 1
        registry.stats.num_preemptions += 1
        registry.suspend(group, SequenceStatus.SWAPPED if decision.swap else SequenceStatus.WAITING)
        if plan is not None:
            plan.has_preempted = True
        how = "swapped out" if decision.swap else "to be recomputed"
        group.metrics.note(self._log.now, f"preempted, {how}")
        self._log.note("preempted", group.request, f"{because}; {how}: {decision.because}")

    def clear_pins(self, group: SequenceGroup) -> bool:
        """End all pins for a group that could not run otherwise, even alone. False when they held nothing."""
        num_held = self._registry.block_manager.clear_pins()
        if num_held:
            self._log.note("unpinned", group.request, f"pins held {num_held} blocks, and it runs only without them")
        return num_held > 0

    def _decide(self, group: SequenceGroup, plan: StepPlan | None) -> Decision:
        manager = self._registry.block_manager
        if self._mode == "recompute":
            return Decision(False, "preemption_mode is recompute")
        if manager.host_pool.num_blocks == 0:
            return Decision(False, "there is no swap space")
        if plan is None:
            return Decision(False, "no step is being planned that could swap it out")
        if plan.swap_ins:
            return Decision(False, "this step swaps in, and a step swaps out before it swaps in")
        if group.refork_at is not None:
            return Decision(False, "it is computing its common prefix")
        if manager.window is not None and not group.may_read_prefix_cache:
            return Decision(False, "prompt_logprobs that are on their way may need tokens that left the window")
        room = manager.swap_space.can_swap_out(group.live)
        if room.status is not AllocStatus.OK:
            return Decision(False, f"the swap space {room.because}")
        if self._mode == "swap":
            return Decision(True, "preemption_mode is swap")
        if self._mode == "classic":
            count = group.max_running_sequences
            return Decision(count > 1, f"{count} sequences may still run")
        return self._cheaper(group, manager)

    def _cheaper(self, group: SequenceGroup, manager: BlockManager) -> Decision:
        """Tokens to compute again at the prefill rate, without those that stay in the cache because others use them,
        against bytes to move out and in again; both at the rates measured so far."""
        num_blocks = manager.swap_space.num_computed_blocks(group.live)
        num_kept = manager.num_blocks_used_by_others(group.live)
        num_tokens = sum(sequence.num_computed_tokens for sequence in group.live)
        num_tokens -= (len(group.live) - 1) * min(group.num_prompt_tokens, num_tokens // len(group.live))
        recompute_s = max(0, num_tokens - num_kept * manager.block_size) / self._rates.prefill_tokens_per_s
        swap_s = 2 * num_blocks * self._rates.block_bytes / self._rates.swap_bytes_per_s
        because = (
            f"{num_tokens} tokens, {num_kept} blocks of them shared, take {recompute_s * 1e3:.3g} ms to compute again, "
            f"{num_blocks} blocks {swap_s * 1e3:.3g} ms to move"
        )
        return Decision(swap_s < recompute_s, because)


def _num_computed_tokens(group: SequenceGroup, computed: dict[int, int]) -> int:
    """Of all its sequences, `computed` tokens each: those of the prompt once, for its blocks are shared."""
    prompt, counts = group.num_prompt_tokens, [computed[sequence.seq_id] for sequence in group.live]
    return min(prompt, max(counts)) + sum(max(0, count - prompt) for count in counts)


def _origin(block: int, copied_from: dict[int, int]) -> int:
    """Where the content of a block is before any of these copies is made; a copy may be made of a copy."""
    while block in copied_from:
        block = copied_from[block]
    return block
