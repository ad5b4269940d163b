"""A request inside the core: a `SequenceGroup`, and the `Sequence`s that it runs.

Only the scheduler changes them. A sequence knows `num_tokens` tokens and has `num_computed_tokens` of them in its
blocks; the scheduler closes that gap. Tokens that were planned but whose results are not back yet count as
`num_pending`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from octavo.core.beam_search import BeamSearch
from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestMetrics
from octavo.core.step import TokenLogprobs


class SequenceStatus(enum.Enum):
    """The state of a sequence. Names of finished states begin with FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FETCHING = "fetching"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_REPETITION = "repetition"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, value: str) -> None:
        # an attribute, because it is read for every token
        self.is_finished = value not in ("waiting", "running", "swapped", "fetching")


class Attachment(Protocol):
    """State that a feature keeps for one sequence, such as the text of a beam or the state of a grammar."""

    def fork(self) -> Self:
        """Return the state for a sequence that is forked from this one and has the same tokens."""


A = TypeVar("A", bound=Attachment)


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens."""

    seq_id: int
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    epoch: int = 0
    """Grows with each preemption that drops tokens in flight; results of an older epoch are dropped."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the blocks once every submitted step has run."""
    num_pending: int = 0
    """Tokens drawn by submitted steps whose results are not back."""
    num_repeated: int = 0
    """Accepted drafts before the last known token that are computed again, because no state was kept after them."""
    is_resident: bool = False
    """Whether the worker holds this sequence's state."""
    candidates: TokenLogprobs | None = None
    """The possible next tokens of this beam, kept until the group's other beams have theirs."""
    num_sent_tokens: int = 0
    """Leading tokens that were sent to the worker; maintained if the worker does not draw them itself."""
    attachments: dict[type[Attachment], Attachment] = field(default_factory=dict)
    """State of features by class; a fork starts with forks of them."""
    parent: tuple[Sequence, int] | None = None
    """The sequence that this one was forked from, and the number of tokens shared then."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are known or pending."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that are drawn and known."""
        return len(self.token_ids) - self.num_prompt_tokens

    def fork(self, seq_id: int, index: int) -> Sequence:
        """Return a copy with the same tokens and the same computed part; the caller forks its blocks."""
        return Sequence(
            seq_id,
            index,
            list(self.token_ids),
            self.num_prompt_tokens,
            self.status,
            num_computed_tokens=self.num_computed_tokens,
            attachments={kind: each.fork() for kind, each in self.attachments.items()},
            parent=(self, len(self.token_ids)),
        )

    def attach(self, state: Attachment) -> None:
        """Store the state of a feature; it replaces a state of the same class."""
        self.attachments[type(state)] = state

    def attached(self, kind: type[A]) -> A | None:
        """Return the state of this class; None when there is none."""
        state = self.attachments.get(kind)
        return state if isinstance(state, kind) else None

    def restart(self) -> None:
        """Forget what was computed (preemption by recomputation); known tokens stay."""
        self.epoch += 1
        self.num_computed_tokens = 0
        self.num_pending = 0
        self._leave_worker()

    def pause(self, num_computed_tokens: int, *, keeps_pending: bool = False) -> None:
        """Leave the device with `num_computed_tokens` tokens in the blocks (preemption by swapping). Drawn tokens
        without a result are dropped, so the last known token is computed again to draw once more. With `keeps_pending`
        their results are awaited, because a recurrent state cannot be rolled back.
        """
        num_known = len(self.token_ids)
        if keeps_pending:
            self.num_computed_tokens = num_computed_tokens
            self.num_pending = max(0, num_computed_tokens + 1 - num_known)
        else:
            self.epoch += 1
            self.num_computed_tokens = min(num_computed_tokens, num_known - 1)
            self.num_pending = 0
        self._leave_worker()

    def _leave_worker(self) -> None:
        self.num_repeated = 0
        self.is_resident = False
        self.candidates = None
        self.parent = None


class SequenceGroup:
    """One request: a prompt, and the sequences that share its blocks.

    arrival: index in the order of arrival; unique.
    virtual_start: place among the prompts of all API requests (`scheduler/turns.py`).
    sequences: all sequences so far, by index; only the first exists until the prompt has been computed.
    live: those that are not finished.
    is_forked: all n sequences exist.
    end_token_ids: every id that ends a sequence (end-of-sequence and stop ids).
    refork_at: after a preemption with several live sequences, the length of the prefix that the first live one computes
        for all before the others fork from it again; None otherwise.
    was_preempted: its known tokens are computed again, because it was preempted or ran in another core before.
    is_drafted: whether the worker's draft model computes its prompt too; None until this is decided.
    width: sequences that are computed at once, `best_of` or n.
    adapter: index of the request's adapter in the workers, 0 for none.
    beams: the state of the beam search; None for requests that draw.
    waits_for_results: the next row of a sequence is planned only when all results of its last row are known.
    num_fetched_tokens: prompt tokens that a connector has supplied. num_dropped_tokens: tokens whose KV was dropped by
    its last preemption by recomputation.
    num_counted_tokens: prompt tokens that statistics have counted.
    num_passed: how often a later group was admitted before this one while it was the first.
    num_prompt_logprobs_sent: prompt positions whose log-probabilities were sent (the first has none).
    num_sent_events: events of the timeline that were sent to the front.
    """

    def __init__(self, request: EngineCoreRequest, arrival: int, first_seq_id: int, virtual_start: float = 0.0) -> None:
        params = request.params
        assert params.max_tokens is not None, "max_tokens is resolved before a request is accepted"
        self.request = request
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_tokens = params.max_tokens
        self.arrival = arrival
        self.virtual_start = virtual_start
        first = Sequence(first_seq_id, 0, list(request.prompt_token_ids), len(request.prompt_token_ids))
        self.sequences = [first]
        self.live = [first]
        self.width = params.width
        self.is_forked = self.width == 1 or params.use_beam_search  # beams fork whenever they branch, not once
        self.is_drafted: bool | None = None
        self.status = SequenceStatus.WAITING
        self.end_token_ids = frozenset(request.end_token_ids) | frozenset(params.stop_token_ids)
        self.refork_at: int | None = None
        self.was_preempted = False
        self.num_cached_tokens = 0
        self.num_fetched_tokens = 0
        self.cache_miss_reason = ""
        self.num_dropped_tokens = 0
        self.num_counted_tokens = 0
        self.num_passed = 0
        self.num_prompt_logprobs_sent = 1
        self.num_sent_events = 0
        self.adapter = 0
        self.waits_for_results = params.use_beam_search or params.structured_outputs is not None
        self.beams = BeamSearch(params, self.max_tokens, self.end_token_ids) if params.use_beam_search else None
        self.metrics = request.metrics.copy() if request.metrics else RequestMetrics.begin(request.arrival_time)

    def resume(self, seq_ids: Iterable[int]) -> None:
        """Make the sequences of a request that ran in another core before, as if it had been preempted now."""
        prompt = self.request.prompt_token_ids
        self.sequences = []
        for seq_id, each in zip(seq_ids, self.request.resumed, strict=True):
            sequence = Sequence(seq_id, each.index, prompt + each.token_ids, len(prompt))
            if each.finish_reason is not None:
                sequence.status = SequenceStatus(each.finish_reason)
            self.sequences.append(sequence)
        self.live = [sequence for sequence in self.sequences if not sequence.status.is_finished]
        self.is_forked = self.was_preempted = True
        self.num_prompt_logprobs_sent = self.num_counted_tokens = len(prompt)
        self.num_dropped_tokens = len(prompt) + sum(sequence.num_output_tokens - 1 for sequence in self.live)

    @property
    def max_running_sequences(self) -> int:
        """Most sequences that this group can still run at once."""
        return self.width if self.beams is not None or not self.is_forked else len(self.live)

    @property
    def is_computing_prompt(self) -> bool:
        """True until a step is planned that computes the last token of the prompt."""
        return not self.has_output and self.sequences[0].num_computed_tokens < self.num_prompt_tokens

    @property
    def has_output(self) -> bool:
        """True once a token of any of its sequences is known."""
        return len(self.sequences) > 1 or self.sequences[0].num_output_tokens > 0

    @property
    def owes_prompt_results(self) -> bool:
        """True while results of prompt positions, log-probabilities or hidden states, are to be sent: those positions
        must be computed."""
        if self.request.pooled is not None and self.request.pooled.needs_all_tokens:
            return True
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs_sent < self.num_prompt_tokens

    @property
    def may_read_prefix_cache(self) -> bool:
        """False until prompt positions that must be computed have been."""
        skips = self.request.params.skip_reading_prefix_cache and not self.has_output
        return not skips and not self.owes_prompt_results

    @property
    def whole_prompt_because(self) -> str:
        """Return the reason why the prefix cache may not be read; meaningful only if it may not."""
        skips = self.request.params.skip_reading_prefix_cache
        return "skip_reading_prefix_cache is set" if skips else "prompt_logprobs needs every position computed"
