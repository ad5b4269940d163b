"""The extension point of speculative decoding: guesses of tokens, which the next row of a sequence verifies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import ModelRunnerOutput, Proposals, RowOutput, SchedulerOutput
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.registry import Registry


class Proposer(Protocol):
    """Proposes the tokens that may follow a sequence. What is generated does not depend on them, only how fast.

    With a proposer every group waits for results: a sequence's next row is planned when its tokens are known.
    What it chooses follows from measured times, so a recording holds it (`scheduler/draft_choices.py`).
    """

    def take_rest(self) -> bool:
        """Return whether the step being planned is one of those in which nothing is asked of it; counts them."""

    def begin_step(self, num_rows: int) -> bool:
        """Begin to plan a step in which `num_rows` sequences decode and no prompt is computed, as far as is known.
        Returns False where no draft is wanted: then nothing is proposed in it."""

    def proposals(self, num_rows: int) -> Proposals:
        """Return what the worker's draft model is to guess for a later step, of `num_rows` sequences that decode."""

    def drafts_prompt(self, num_computed: int) -> bool:
        """Return whether the worker's draft model is to compute a prompt beside the model, behind its first
        `num_computed` tokens, which were found."""

    def propose(self, group: SequenceGroup, sequence: Sequence, max_drafts: int) -> list[int]:
        """Return at most `max_drafts` (at least 1) ids of the vocabulary that may follow the known tokens; or none."""

    def note_forced(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        """Note tokens that have to follow the first `num_known` of a sequence."""

    def note_proposed(self, group: SequenceGroup, sequence: Sequence, tokens: tuple[int, ...], num_known: int) -> None:
        """Note what the worker's draft model guesses behind the first `num_known` tokens of a sequence."""

    def note_drafting(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """Note the time of the worker's draft model for `num_rows` rows without prompts; 0 for a step with some."""

    def note_step(self, num_tokens: int, seconds: float, num_plain: int) -> None:
        """Note the time of a step that has computed `num_tokens` tokens, drafts among them, and no prompt; the time of
        a draft model is not counted. num_plain: 0 for a step with drafts; of one without, how many have come without
        prompts, drafts and a draft model's passes up to it, at least 1."""

    def note_drawn(self, num_rows: int, num_drawn: int, seconds: float) -> None:
        """Note how many tokens a step with drafts has brought, those behind the end of a sequence not counted, and its
        time without that of a draft model."""


_NO_DRAFTS: Final[Mapping[int, int]] = MappingProxyType({})


class _DraftedStep(NamedTuple):
    """A step that was planned. num_tokens: 0 where it computes prompts. num_drafts: by sequence. num_proposing: rows
    for which the worker's draft model guesses. is_resting: the proposer did not take part, without a
    prompt."""

    num_rows: int
    num_tokens: int
    num_drafts: Mapping[int, int]
    num_proposing: int
    is_resting: bool = False


class _Verification(NamedTuple):
    """A step with drafts whose tokens are not applied yet. num_generated: tokens that were generated before it."""

    num_rows: int
    num_tokens: int
    seconds: float
    num_generated: int


class DraftMeter:
    """Counts what becomes of drafts, and measures the steps that have them and those that could have."""

    def __init__(self, proposer: Proposer, registry: Registry) -> None:
        self._proposer, self._registry = proposer, registry
        self._planned: deque[_DraftedStep] = deque()
        self._num_plain = 0
        """Steps without prompts, drafts and passes of a draft model, up to the last one."""
        self._last: _Verification | None = None

    def note_planned(self, step: SchedulerOutput, plan: StepPlan) -> None:
        """Count a step that is submitted now."""
        if plan.is_resting:
            self._planned.append(_DraftedStep(0, 0, _NO_DRAFTS, 0, is_resting=not plan.num_prompt_tokens))
            return
        drafts, num_proposing, num_rows = _NO_DRAFTS, 0, len(step.rows)
        num_tokens = num_rows + sum(plan.repeats.values())
        if plan.may_draft or plan.proposals.num_tokens:
            drafts = {row.seq_id: len(row.drafts) for row in step.rows if row.drafts}
            num_proposing = sum(row.num_proposals > 0 for row in step.rows)
            num_tokens += sum(drafts.values())
        num_tokens = 0 if plan.num_prompt_tokens else num_tokens
        self._planned.append(_DraftedStep(num_rows, num_tokens, drafts, num_proposing))

    def note_done(self, output: ModelRunnerOutput, seconds: float) -> None:
        """Count the results of the oldest step, which took `seconds`; before they are applied."""
        step = self._planned.popleft()
        num_generated = self._registry.stats.num_generated_tokens
        if (last := self._last) is not None:
            num_drawn = min(last.num_tokens, num_generated - last.num_generated)
            self._proposer.note_drawn(last.num_rows, num_drawn, last.seconds)
            self._last = None
        if not step.is_resting:
            is_plain = step.num_tokens and not step.num_drafts and not output.draft_s
            self._num_plain = self._num_plain + 1 if is_plain else 0
        if step.num_tokens:
            num_plain = 0 if step.num_drafts else max(1, self._num_plain)
            self._proposer.note_step(step.num_tokens, seconds - output.draft_s, num_plain)
            if step.num_drafts:
                self._last = _Verification(step.num_rows, step.num_tokens, seconds - output.draft_s, num_generated)
        if output.draft_s:
            num_rows = step.num_proposing if step.num_tokens else 0
            self._proposer.note_drafting(num_rows, output.num_draft_passes, output.draft_s)
        if step.num_drafts or output.has_guesses:
            for row in output.rows:
                if row.tokens:
                    self._note_row(row, step.num_drafts.get(row.seq_id, 0))

    def _note_row(self, row: RowOutput, num_drafts: int) -> None:
        """Count the drafts that a row's tokens prove right, and pass on what is guessed behind them."""
        group, sequence = self._registry.find(row.seq_id)
        if group is None or sequence is None or sequence.epoch != row.epoch:
            return
        num_known = len(sequence.token_ids) + len(row.tokens)
        if row.forced:
            self._proposer.note_forced(group, sequence, row.forced, num_known)
        if row.proposed:
            self._proposer.note_proposed(group, sequence, row.proposed, num_known)
        if num_drafts:
            num_accepted = len(row.tokens) - 1
            self._registry.stats.note_drafts(num_drafts, num_accepted)
            group.metrics.num_draft_tokens += num_drafts
            group.metrics.num_accepted_tokens += num_accepted
